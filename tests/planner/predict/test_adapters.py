"""Adapters in rehearsals: against runs of models that peft has wrapped, on tensors with values."""

from functools import partial
from typing import Any

import pytest
import torch
from planner.predict.test_shallow import ALONE, causal_model, words
from planner.rehearsed import peak_of
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zeroshard as zs
from zeroshard.errors import ModelError
from zeroshard.planner.predict.adapters import AdaptedLinear, PackedLinear, put_adapters
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.shallow import facts_of_model
from zeroshard.planner.search.adapted import with_adapters
from zeroshard.planning.adapters import AdapterName, Adapters

MAKE = partial(torch.optim.AdamW, lr=1e-3)
ROWS, SEQUENCE = 8, 48
CASES: list[tuple[AdapterName, str, str]] = [
    ("lora", "fp32", "Llama"),
    ("lora", "bf16", "Llama"),
    ("qlora", "fp32", "Llama"),
    ("lora", "fp32", "Mixtral"),
]


def wrapped(name: AdapterName, kind: str) -> nn.Module:
    """The model of the test as peft trains it; with bitsandbytes' layers of 4 bits for "qlora"."""
    peft = pytest.importorskip("peft")
    model = causal_model(kind, recomputes=False)
    if name == "qlora":
        _pack(model, pytest.importorskip("bitsandbytes").nn)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    found: nn.Module = peft.get_peft_model(model, config)
    return found


def _pack(model: Any, kinds: Any) -> None:
    for parent in list(model.modules()):
        for path, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer is not model.lm_head:
                packed = kinds.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
                packed.weight = kinds.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
                setattr(parent, path, packed.to("cpu"))
    model.is_loaded_in_4bit = True


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # of the imported packages
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_peaks_are_those_of_runs_with_peft(case: tuple[AdapterName, str, str]) -> None:
    name, precision, kind = case
    plan = zs.Plan(zero=0, precision=precision)
    job = TrainingTask(partial(causal_model, kind, False), words, MAKE, ROWS, SEQUENCE)
    predicted = predict(with_adapters(job, Adapters(name)), plan, ALONE, ROWS)
    model, batch = wrapped(name, kind), words(ROWS)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        engine = zs.Engine(model, MAKE, plan, mesh=zs.Mesh())
        for _ in range(3):
            engine.train_step(batch)
        states = engine.ledger.snapshot()
    assert predicted.peak_bytes == pytest.approx(peak_of(watched), rel=0.005)
    assert all(states[kind] == predicted.memory[kind] for kind in ("gradients", "optimizer states"))
    held = [found["parameters"] + found["buffers"] for found in (states, predicted.memory)]  # scales are either
    assert held[0] == pytest.approx(held[1], rel=1e-3)
    assert predicted.adapters == f"{'LoRA' if name == 'lora' else 'QLoRA'} of rank 16"


def test_linear_layers_are_frozen_and_the_output_layer_has_no_adapter() -> None:
    model = causal_model("Llama", recomputes=False)
    before = facts_of_model(model).parameters
    put_adapters(model, Adapters("qlora", 4))
    adapted = [layer for layer in model.modules() if isinstance(layer, AdaptedLinear)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(adapted) == 6 * 7 and type(model.lm_head) is nn.Linear
    assert {id(p) for p in trained} == {id(p) for layer in adapted for p in (layer.down, layer.up)}
    assert facts_of_model(model).parameters == before + sum(p.numel() for p in trained)


def test_a_packed_layer_takes_half_a_byte_for_a_weight_and_keeps_nothing_else() -> None:
    packed = PackedLinear(nn.Linear(256, 512), (512, 256))
    assert packed.weight.nbytes == 2**16
    assert packed.get_buffer("scales").nbytes == 2**17 // 64 + 4 * 2**17 // 64 // 256
    kept: list[torch.Tensor] = []
    x = torch.ones(2, 3, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        packed(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert [t.dtype for t in kept] == [torch.uint8]


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="Conv1d has no linear layers besides its output layer"):
        put_adapters(nn.Conv1d(3, 3, 1), Adapters("lora", 16))
