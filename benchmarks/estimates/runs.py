"""The runs whose peak of memory is predicted, and one rank of one of them, measured.

Measured are the events of torch's own allocator, from before the model is made to the end of the last step, as
torch.profiler records them. It does not record the release of a tensor by a thread of gloo. Such a miss only adds,
mostly 1 KiB, until the address is given out again; so the lowest of several peaks of the same run counts.
"""

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

STEPS, STAGED, STREAMED = 3, 6, 8  # steps of a run, the last of which are alike; with stages and without a flush
ROWS, TOKENS = 4, 128  # of a rank and step
NARROW, WIDE, TALL = (1024, 128, 4, 4), (16384, 256, 4, 4), (1024, 128, 4, 6)  # vocabulary, width, heads, layers
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-4, momentum=0.9, foreach=False),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of a few steps.

    Attributes:
        engine: a key of `ENGINES`.
        model: "gpt", ours, or a family of transformers.
        shape: vocabulary, width, heads, layers.
        precision: "fp32" or "bf16"; torch's own engines compute bf16 by autocast, FSDP2 by its policy.
        plan: more fields of zeroshard's `Plan`.
        recompute: whether the model's blocks checkpoint their activations, as transformers does it.
    """

    engine: str = "zeroshard"
    ranks: int = 2
    model: str = "gpt"
    shape: tuple[int, int, int, int] = NARROW
    precision: str = "fp32"
    plan: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    recompute: bool = False

    def __str__(self) -> str:
        layers = "x".join(map(str, self.shape))
        words = [self.engine, f"{self.ranks} rank{'s' * (self.ranks > 1)}", f"{self.model} {layers}", self.precision]
        words += [f"{key} {value}" for key, value in self.plan.items() if key not in ("stages", "balance")]
        words += [self.optimizer] * (self.optimizer != "adamw") + ["recompute"] * self.recompute
        return ", ".join(words)

    def build(self) -> nn.Module:
        """The model on the current device; ours on the meta device where zeroshard trains it."""
        vocabulary, width, heads, layers = self.shape
        if self.model == "gpt":
            from zeroshard.train.gpt import GPT
            from zeroshard.train.sizes import GPTConfig

            with torch.device("meta") if self.engine == "zeroshard" else contextlib.nullcontext():
                return GPT(GPTConfig(vocabulary, TOKENS, width, heads, layers))
        model: nn.Module = _transformers(self.model, self.shape)
        if self.recompute:
            model.activation_checkpointing_enable()  # type: ignore[operator]
        return model.train()

    def batch(self, rows: int = ROWS) -> dict[str, Tensor]:
        """So many rows."""
        tokens = torch.arange(rows * TOKENS).remainder(self.shape[0]).view(rows, TOKENS)
        first, second = ("tokens", "targets") if self.model == "gpt" else ("input_ids", "labels")
        return {first: tokens, second: tokens}

    def optimizer_of(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer."""
        return OPTIMIZERS[self.optimizer](parameters)

    @property
    def steps(self) -> int:
        """Steps to take: buffers of lent weights are made until a few loans are under way."""
        plan = self.zeroshard_plan() if self.engine == "zeroshard" else None
        return STREAMED if plan and plan.streams else STAGED if plan and plan.pipelined else STEPS

    def zeroshard_plan(self) -> Any:
        """The plan."""
        import zeroshard as zs

        return zs.Plan.from_dict({"precision": self.precision, "transport": "network", **self.plan})  # type: ignore[arg-type]


def _transformers(family: str, shape: tuple[int, int, int, int]) -> Any:
    """A small model of a family, with half as many key and value heads as heads where it can have them."""
    import transformers

    vocabulary, width, heads, layers = shape
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "intermediate_size": 4 * width}
    sizes |= {"max_position_embeddings": TOKENS, "use_cache": False}
    if family == "gpt2":
        sizes = {"vocab_size": vocabulary, "n_positions": TOKENS, "n_embd": width, "n_layer": layers, "n_head": heads}
        sizes |= {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    elif family == "qwen3":
        sizes["head_dim"] = width // heads
    elif family == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    name = {"gpt2": "GPT2", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral"}[family]
    config = getattr(transformers, f"{name}Config")(**sizes)
    build: Any = transformers.AutoModelForCausalLM.from_config
    return build(config)


Made = tuple[Callable[[], Any], Callable[[], int]]  # a step, and the bytes of all model states after one


def zeroshard_engine(run: Run) -> Made:
    """Ours."""
    import zeroshard as zs
    from zeroshard.memory.ledger import MODEL_STATES

    plan, mesh = run.zeroshard_plan(), zs.init_mesh(device="cpu")
    batch = run.batch()
    example = run.batch(max(1, ROWS // plan.microbatches)) if plan.pipelined else None
    engine = zs.Engine(run.build(), run.optimizer_of, plan, mesh=mesh, example=example)

    def states() -> int:
        snapshot = engine.ledger.snapshot()
        return sum(snapshot.get(category, 0) for category in MODEL_STATES)

    return lambda: engine.train_step(batch), states


def plain(run: Run) -> Made:
    """The plain loop of one process."""
    return loop(run, run.build(), run.precision == "bf16")


def ddp(run: Run) -> Made:
    """DistributedDataParallel."""
    torch.distributed.init_process_group("gloo")
    return loop(run, nn.parallel.DistributedDataParallel(run.build()), run.precision == "bf16")


def fsdp2(run: Run) -> Made:
    """FSDP2: `fully_shard` on every block and on the root."""
    return loop(run, sharded(run, mesh_of(run)), False)


def deepspeed_engine(run: Run) -> Made:
    """DeepSpeed with fused AdamW, no clipping, and buckets of the model's size; otherwise its own defaults.

    Its default buckets of 5e8 elements would dominate the memory of so small a model.
    """
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.init_distributed("gloo", verbose=False)
    model, batch = run.build(), run.batch()
    bucket = sum(parameter.numel() for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {
            "stage": run.plan["zero"],
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "bf16": {"enabled": run.precision == "bf16"},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    wrapped, *_ = deepspeed.initialize(model=model, optimizer=run.optimizer_of(model.parameters()), config=config)

    def step() -> None:
        wrapped.backward(wrapped(**batch))
        wrapped.step()

    return step, lambda: 0


ENGINES = {"zeroshard": zeroshard_engine, "plain": plain, "ddp": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed_engine}


def mesh_of(run: Run) -> Any:
    """All ranks of a run, for FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (run.ranks,))


def sharded(run: Run, mesh: Any) -> nn.Module:
    """Our GPT under FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if run.precision == "bf16" else MixedPrecisionPolicy()
    model: Any = run.build()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model  # type: ignore[no-any-return]


def loop(run: Run, model: nn.Module, autocast: bool) -> Made:
    """A step of torch's plain loop."""
    optimizer, batch = run.optimizer_of(model.parameters()), run.batch()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            out = model(**batch)
        (out if isinstance(out, Tensor) else out.loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    def states() -> int:
        weights = sum(_nbytes(parameter) for parameter in model.parameters())
        kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return 2 * weights + sum(map(_nbytes, kept))

    return step, states


def _nbytes(tensor: Any) -> int:
    """Of a tensor, or of this rank's part of it."""
    nbytes: int = getattr(tensor, "_local_tensor", tensor).nbytes
    return nbytes


def measure(run: Run) -> dict[str, Any]:
    """This rank's peak of all bytes that torch allocated, its model states, and its events."""
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as heard:
        step, states = ENGINES[run.engine](run)
        for _ in range(run.steps):
            step()
    changes: list[tuple[int, int, int]] = []
    waiting = list(heard.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    alive: dict[int, int] = {}
    now = peak = 0
    for _, address, change in sorted(changes):
        now -= alive.pop(address, 0)  # also where its end was not heard and the address is given out again
        if change > 0:
            alive[address] = change
            now += change
            peak = max(peak, now)
    return {"rank": int(os.environ["RANK"]), "peak": peak, "states": states(), "events": len(changes)}
