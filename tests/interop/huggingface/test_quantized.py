"""Models of transformers in 4 and 8 bits: codes as transformers makes them, and QLoRA equal to one process."""

import functools
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.huggingface.families import TEXT, VOCABULARY
from pool import Pool

import zeroshard as zs

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("torchao"):
    importlib.import_module("torchao.quantization")  # else by peft, while other ranks wait

SIZES = {**TEXT, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 1, "head_dim": 32}
FAMILIES = {
    "llama": ("LlamaForCausalLM", SIZES),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
NETWORK = {"transport": "network"}
PLANS: dict[str, dict[str, Any]] = {
    **{f"stage {zero}": {"zero": zero, **NETWORK} for zero in range(4)},
    "offload": {"zero": 3, "offload": "optimizer,parameters", **NETWORK},
    "tensor ranks": {"tensor_parallel": 2, **NETWORK},
    "two stages": {"pipeline_parallel": {"stages": 2, "schedule": "1f1b"}, "microbatches": 2},
    "expert ranks": {"expert_parallel": 2},
}
STEPS = 3


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def folder(family: str) -> Path:
    """A float model of a family, as files."""
    path = Path(_root().name) / family
    name, sizes = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(3)
    kind(kind.config_class(**sizes)).save_pretrained(path)
    return path


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def adapters() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def settings(kind: str) -> Any:
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    double = kind == "nf4"
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double
    )


def as_zeroshard_names(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model that transformers has quantised."""
    found = dict(model.named_parameters())
    for path, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state
            found[f"{path}.weight_absmax"] = state.absmax
            if state.nested:
                found |= {f"{path}.weight_nested_absmax": state.state2.absmax, f"{path}.weight_offset": state.offset}
        elif isinstance(module, bnb.nn.Linear8bitLt):
            found[f"{path}.weight_SCB"] = module.weight.SCB
    return found


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_codes_and_files_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    for dtype in (torch.float32, torch.bfloat16):
        config = settings(kind)
        config.bnb_4bit_compute_dtype = dtype
        theirs = load(folder("llama"), quantization_config=config, dtype=dtype, device_map="cpu")
        engine = zs.from_pretrained(folder("llama"), optimizer, quantized=config, dtype=dtype)
        expected = as_zeroshard_names(theirs)
        ours = {name: value for name, value in engine.state_dict().items() if name in expected}
        assert ours.keys() == expected.keys() and {torch.uint8, torch.int8} & {v.dtype for v in ours.values()}
        assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []
    theirs.save_pretrained(tmp_path / "quantised")
    again = zs.from_pretrained(tmp_path / "quantised", optimizer, dtype="auto").state_dict()
    assert {name for name in ours if not torch.equal(ours[name], again[name])} == set()


def train(mesh: zs.Mesh, path: str, names: Sequence[str]) -> Any:
    """By plan: losses, and initial adapters; a refusal as text."""
    results: dict[str, Any] = {}
    for name in names:
        plan = zs.Plan.from_dict(PLANS[name])
        engine = zs.from_pretrained(
            path, optimizer, plan, mesh=mesh, quantized="nf4", adapters=adapters(), example=batch(0)
        )
        first = {key: value for key, value in engine.state_dict().items() if "lora_" in key}
        losses = []
        for step in range(STEPS):
            own = {k: v.chunk(engine.data_ranks)[engine.data_rank] for k, v in batch(step).items()}
            losses.append(engine.train_step(own).loss.item())  # type: ignore[union-attr]
        results[name] = losses, first
    return results


def one_process(family: str, first: dict[str, torch.Tensor]) -> list[float]:
    """Losses of a plain loop over a model with the weights that the codes stand for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32)

    def behind_codes(matrix: torch.Tensor) -> torch.Tensor:
        codes, state = bnb.functional.quantize_4bit(matrix.contiguous(), quant_type="nf4", compress_statistics=True)
        whole: torch.Tensor = bnb.functional.dequantize_4bit(codes, state)
        return whole

    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = behind_codes(parameter.data)
        elif parameter.dim() == 3:
            parameter.data = torch.stack([behind_codes(matrix) for matrix in parameter.data])
    model = peft.get_peft_model(model, adapters()).train()
    assert not model.load_state_dict(first, strict=False).unexpected_keys
    ours, losses = optimizer(model.parameters()), []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        ours.step()
        ours.zero_grad()
        losses.append(loss.item())
    return losses


CASES = {
    "llama": ("stage 0", "stage 2", "offload", "tensor ranks", "two stages"),
    "mixtral": ("stage 0", "stage 3", "expert ranks"),
}
WHOLE = {"llama": tuple(PLANS)[:-1], "mixtral": tuple(PLANS)}  # a dense model has no expert ranks


@pytest.mark.parametrize(
    ("family", "names"), [*CASES.items(), *(pytest.param(*case, marks=pytest.mark.whole) for case in WHOLE.items())]
)
def test_qlora_equals_one_process(pool: Pool, family: str, names: tuple[str, ...]) -> None:
    by_rank = pool.run(train, 2, str(folder(family)), names)
    expected = one_process(family, by_rank[0]["stage 0"][1])
    for name in names:
        losses = torch.tensor([results[name][0] for results in by_rank], dtype=torch.float64).mean(0).tolist()
        assert losses == pytest.approx(expected, rel=1e-6), name


def export(mesh: zs.Mesh, path: str, out: str, plan: dict[str, Any]) -> float:
    """The loss of an evaluation after a step whose weights are exported, merged."""
    engine = zs.from_pretrained(
        path, optimizer, zs.Plan.from_dict(plan), mesh=mesh, quantized="nf4", adapters=adapters()
    )
    own = {k: v.chunk(engine.data_ranks)[engine.data_rank] for k, v in batch(0).items()}
    engine.train_step(own)
    engine.export(out, merge=True)
    with torch.no_grad():
        loss: float = engine(**batch(1)).loss.item()
    return loss


@pytest.mark.parametrize("family, plan", [("llama", "stage 3"), ("mixtral", "expert ranks")])
def test_merged_exports_are_dequantised(pool: Pool, family: str, plan: str, tmp_path: Path) -> None:
    loss, _ = pool.run(export, 2, str(folder(family)), str(tmp_path / "merged"), PLANS[plan])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")
    with torch.no_grad():
        assert model(**batch(1)).loss.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_whole_weights_are_those_that_codes_stand_for(kind: str) -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(folder("llama"), quantization_config=settings(kind), dtype=torch.float32, device_map="cpu")
    engine = zs.from_pretrained(folder("llama"), optimizer, quantized=settings(kind))
    expected = {n: p.detach() for n, p in theirs.dequantize().named_parameters() if n != "lm_head.weight"}
    found = dict(engine.weights())
    assert expected.keys() <= found.keys() and not any("absmax" in name or "SCB" in name for name in found)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values.to(found[name].dtype), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantized": "nf5"}, r"quantized is 'nf5'; give 'nf4', 'fp4', 'int8', or a BitsAndBytesConfig"),
        (
            {"quantized": transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True)},
            "keeps 16-bit",
        ),
        (
            {
                "quantized": transformers.BitsAndBytesConfig(
                    load_in_4bit=True, llm_int8_skip_modules=["model", "lm_head"]
                )
            },
            "no linear",
        ),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(zs.ModelError, match=message):
        zs.from_pretrained(folder("llama"), optimizer, **options)
