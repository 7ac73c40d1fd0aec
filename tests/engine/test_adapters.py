"""Adapters of peft under every kind of plan: the losses and weights are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.adapters import ADAMW, ADAPTERS, adapted, attach, base, batch, engine_of, plain, rows_of, take_steps
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.checkpoint.reader import Reader
from zeroshard.errors import ModelError

pytest.importorskip("peft")
PLANS: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3, "transport": "network"},
    "offload": {"zero": 3, "offload": "optimizer,parameters"},
    "stages": {"pipeline_parallel": 2, "microbatches": 2},
    "tensor": {"zero": 1, "tensor_parallel": 2},
    "experts": {"zero": 1, "expert_parallel": 2},
}
MATRIX = [
    *(("lora", plan) for plan in PLANS if plan != "experts"),
    ("dora", "zero3"),
    ("head", "zero3"),
    ("experts", "zero2"),
    ("experts", "experts"),
]


def train(mesh: zs.Mesh, name: str, plan: str) -> tuple[int, list[float], dict[str, Tensor]]:
    """Losses of a data rank, and the whole weights."""
    engine = engine_of(mesh, adapted(name, seed=5 + mesh.rank), **PLANS[plan])  # rank 0's values are to be taken
    losses = take_steps(engine)
    engine.check_replicas()
    return engine.data_rank, losses, engine.state_dict()


@pytest.mark.parametrize("name, plan", MATRIX)
def test_adapters_train_as_in_one_process(pool: Pool, name: str, plan: str) -> None:
    answers = pool.run(train, 2, name, plan)
    parts = 2 if plan == "stages" else len({rank for rank, _, _ in answers})
    wanted = plain(name, parts)
    by_rank = {rank: losses for rank, losses, _ in answers if losses[0] == losses[0]}
    found = torch.tensor(list(by_rank.values()), dtype=torch.float64).mean(0)
    torch.testing.assert_close(found, torch.tensor(wanted.losses, dtype=torch.float64), rtol=1e-6, atol=0)
    for _, _, weights in answers:
        assert weights.keys() == wanted.weights.keys()
        for key, value in wanted.weights.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-5, msg=key)


def on_meta(name: str, init: Any = True) -> nn.Module:
    """A model on the meta device with adapters of the kind that peft makes by default."""
    with torch.device("meta"):
        return attach(base(ADAPTERS[name][0]), name, init_lora_weights=init)


def from_files(mesh: zs.Mesh, name: str, folder: Path, plan: str) -> dict[str, Tensor]:
    """The weights after the base was read from files, of an engine that was made from a model on meta."""
    model = on_meta(name)
    engine = engine_of(mesh, model, initialise=zeros, **PLANS[plan])
    engine.load_weights(folder)
    return engine.state_dict()


def zeros(module: nn.Module) -> None:
    """Fill a module with zeros, and the rotary tables as their class does."""
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)
    if any(True for _ in module.buffers(recurse=False)):
        for name, buffer in type(module)(module.config).named_buffers():  # type: ignore[operator]
            module.get_buffer(name).copy_(buffer)


@pytest.mark.parametrize("name, plan", [("lora", "zero2"), ("dora", "zero3"), ("head", "zero0"), ("experts", "zero3")])
def test_adapters_on_meta_are_those_of_peft_over_the_base_in_files(
    pool: Pool, tmp_path: Path, name: str, plan: str
) -> None:
    kind = ADAPTERS[name][0]
    base(kind).save_pretrained(tmp_path)
    one, other = pool.run(from_files, 2, name, tmp_path, plan)
    wanted = attach(base(kind), name, init_lora_weights=True).state_dict()
    assert one.keys() == other.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(one[key], other[key]), key
        if "lora_A" not in key:  # B is zero, magnitudes are norms, and the trained copy is the base's
            torch.testing.assert_close(one[key], value, rtol=1e-6, atol=0, msg=key)
            continue
        bound = 1 / value.shape[-1] ** 0.5  # of a uniform distribution
        assert 0.5 * bound < one[key].abs().max() <= bound and one[key].std() > 0.3 * bound, key


def test_an_initialisation_from_the_values_of_the_base_is_refused_on_meta() -> None:
    with pytest.raises(ModelError, match=r"q_proj' is on the meta device with init_lora_weights='olora'"):
        engine_of(None, on_meta("lora", "olora"), initialise=zeros)


def bytes_of(mesh: zs.Mesh) -> dict[str, int]:
    """Measured bytes of a rank by category, after a step in bf16 under stage 3."""
    engine = engine_of(mesh, adapted("lora"), zero=3, transport="network", precision="bf16")
    engine.train_step(rows_of(batch(0), engine.data_rank, engine.data_ranks))
    return {str(row.category): row.measured_bytes - (row.padding_bytes or 0) for row in engine.memory()}


def test_a_frozen_base_has_slices_of_16_bits_alone(pool: Pool) -> None:
    measured = pool.run(bytes_of, 2)
    model = adapted("lora")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    every = sum(p.numel() for p in model.parameters())
    total = {key: sum(found[key] for found in measured) for key in measured[0]}
    assert total["parameters"] == 2 * every
    assert total["master weights"] == 4 * trained
    assert total["optimizer states"] == 8 * trained


def test_adapters_of_a_base_in_files_resume_without_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base("llama").save_pretrained(tmp_path / "base")
    config = {"r": 2, "task_type": "CAUSAL_LM", "init_lora_weights": False, **ADAPTERS["dora"][1]}

    def begin() -> zs.Engine:
        return zs.from_pretrained(tmp_path / "base", ADAMW, zs.Plan(zero=3), adapters=peft.LoraConfig(**config))

    engine = begin()
    take_steps(engine, 2)
    engine.save(tmp_path / "saved", wait=True)
    wanted = take_steps(engine, 2)
    assert all("lora_" in name for name in Reader(tmp_path / "saved").names("weight"))
    again = begin()
    again.load(tmp_path / "saved")
    assert take_steps(again, 2) == wanted
    again.save(tmp_path / "later", wait=True)
    assert all("lora_" in name for name in Reader(tmp_path / "later").names("weight"))
