"""Models with adapters of peft, their batches, and engines that train them on the pool's workers."""

from functools import cache, partial
from typing import Any

import torch
from plain_loop import PlainRun, plain_loop
from torch import Tensor, nn

import zeroshard as zs

VOCABULARY, POSITIONS, ROWS, STEPS = 32, 6, 4, 4
TEXT = {
    "vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LAYERS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": LAYERS}),
    "dora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}),
}
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4)


def base(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A causal model of a family, with the same weights every time."""
    import transformers

    torch.manual_seed(3)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**TEXT, **MIXTURE)
        model: nn.Module = transformers.MixtralForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    return model.to(dtype)


def attach(model: nn.Module, name: str, seed: int = 5, **more: Any) -> nn.Module:
    """The model with the adapters of `ADAPTERS`; B is not zero, so that A has gradients from the first step on."""
    import peft

    torch.manual_seed(seed)
    settings = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    wrapped: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**settings | ADAPTERS[name][1] | more))
    return wrapped


def adapted(name: str, dtype: torch.dtype = torch.float32, seed: int = 5) -> nn.Module:
    """A base with adapters."""
    return attach(base(ADAPTERS[name][0], dtype), name, seed)


def batch(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    """The whole batch of a step."""
    words = torch.randint(3, VOCABULARY, (rows, POSITIONS), generator=torch.Generator().manual_seed(step))
    return {"input_ids": words, "labels": words}


def rows_of(whole: dict[str, Tensor], number: int, count: int) -> dict[str, Tensor]:
    """One of `count` equal parts of a batch."""
    return {key: value.chunk(count)[number].contiguous() for key, value in whole.items()}


@cache
def plain(name: str, parts: int) -> PlainRun:
    """The loop in one process, on the mean over the parts of a step."""
    steps = [[rows_of(batch(step), part, parts) for part in range(parts)] for step in range(STEPS)]
    return plain_loop(adapted(name), ADAMW, steps, lambda model, part: model(**part).loss)


def engine_of(mesh: zs.Mesh | None, model: nn.Module, initialise: Any = None, **plan: Any) -> zs.Engine:
    """An engine of a model under a plan."""
    chosen = zs.Plan.from_dict(plan)
    example = rows_of(batch(0), 0, ROWS) if chosen.pipelined else None
    trained = lambda ps: ADAMW([p for p in ps if p.requires_grad])  # noqa: E731
    return zs.Engine(model, trained, chosen, mesh=mesh, initialise=initialise, example=example)


def take_steps(engine: zs.Engine, count: int = STEPS) -> list[float]:
    """Losses of some more steps; NaN where the rank has none."""
    losses = []
    for step in range(engine.steps, engine.steps + count):
        result = engine.train_step(rows_of(batch(step), engine.data_rank, engine.data_ranks))
        losses.append(float("nan") if result.loss is None else float(result.loss))
    return losses
