"""Weights from safetensors files: each rank takes its slices, under every stage, and nothing else changes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import batch, build
from inside import held_states, parts_of
from pool import Pool
from safetensors.torch import save_file
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import weights as module
from zeroshard.checkpoint.weights import Shards
from zeroshard.errors import CheckpointError

PLANS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero": stage} for stage in range(4)},
    "zero1-bf16": {"zero": 1, "precision": "bf16"},
    "zero3-bf16": {"zero": 3, "precision": "bf16"},
}


def gpt2(seed: int, whole: bool = True) -> nn.Module:
    """A GPT-2 of transformers, with or without its head."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=29, n_positions=32, n_embd=12, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=None
    )
    return (transformers.GPT2LMHeadModel if whole else transformers.GPT2Model)(config)


def masters(engine: zs.Engine) -> dict[str, torch.Tensor]:
    """This rank's slices of what it updates."""
    return {
        entry.name: part.updater.values[low - part.updater.start : high - part.updater.start].clone()
        for part in parts_of(engine).all
        for index in [part.flat.index]
        for number, low, high in index.overlaps(part.updater.start, part.updater.start + part.updater.values.numel())
        for entry in [index.entries[number]]
    }


def load(mesh: zs.Mesh, plan: dict[str, Any], path: str) -> Any:
    """The state dict and this rank's masters after loading."""
    engine = zs.Engine(gpt2(1 + mesh.rank), partial(torch.optim.AdamW, lr=1e-2), zs.Plan.from_dict(plan), mesh=mesh)
    engine.load_weights(path)
    return engine.state_dict(), masters(engine)


@pytest.mark.parametrize("plan", PLANS)
def test_what_transformers_saved_is_loaded_bit_for_bit(pool: Pool, plan: str, tmp_path: Path) -> None:
    saved = gpt2(0)
    saved.save_pretrained(tmp_path / "w", max_shard_size="8KB")
    assert len(list((tmp_path / "w").glob("model-*.safetensors"))) > 2
    expected = saved.state_dict()
    answers = pool.run(load, 2, PLANS[plan], str(tmp_path / "w"))
    for weights, _ in answers:
        assert weights.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(weights[name], values.to(weights[name].dtype))
    for name in answers[0][1].keys() | answers[1][1].keys():
        parts = [held[name].reshape(-1) for _, held in answers if name in held]
        whole = torch.cat(parts if PLANS[plan]["zero"] else parts[:1])
        assert torch.equal(whole, expected[name].reshape(-1)), name  # masters in fp32 are not rounded


def test_files_without_the_prefix_of_the_base_model(pool: Pool, tmp_path: Path) -> None:
    base = gpt2(0, whole=False)
    mask = {"h.0.attn.bias": torch.ones(1, 1, 32, 32)}  # which older versions kept beside the weights
    save_file(base.state_dict() | mask, tmp_path / "model.safetensors")
    for weights, _ in pool.run(load, 2, PLANS["zero2"], str(tmp_path)):
        for name, values in base.state_dict().items():
            assert torch.equal(weights[f"transformer.{name}"], values)
        assert torch.equal(weights["lm_head.weight"], base.state_dict()["wte.weight"])


class Normed(nn.Module):
    """Parameters, buffers that are kept, and one that is not; head and embedding are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens))).square().mean()


def load_counting(mesh: zs.Mesh, zero: int, path: str) -> Any:
    """The bytes that a rank read, those that it owns, and what became of the buffers and of Adam's states."""
    engine = zs.Engine(Normed(), partial(torch.optim.AdamW, lr=1e-2), zs.Plan(zero=zero), mesh=mesh)
    engine.backward(engine(torch.arange(8)))
    engine.step()
    opened: list[Shards] = []
    before = module.Shards

    def counting(*args: Any) -> Shards:
        opened.append(before(*args))
        headers.append(opened[-1].bytes_read)
        return opened[-1]

    headers: list[int] = []
    module.Shards = counting  # type: ignore[misc, assignment]
    try:
        engine.load_weights(path)
    finally:
        module.Shards = before  # type: ignore[misc]
    read = sum(shards.bytes_read for shards in opened) - sum(headers)
    owned = sum(part.updater.values.nbytes for part in parts_of(engine).all)
    states = held_states(engine).values()
    moved = all(state["exp_avg"].any() and state["step"] == 1 for state in states)
    return read, owned, engine.state_dict(), moved


@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_reads_its_slice(pool: Pool, zero: int, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = Normed()
    model.norm(torch.randn(3, 64))
    weights = model.state_dict()
    del weights["head.weight"]
    save_file(weights, tmp_path / "w.safetensors")
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for read, owned, found, kept in pool.run(load_counting, 2, zero, str(tmp_path / "w.safetensors")):
        assert owned == pytest.approx(whole if zero == 0 else whole / 2, rel=0.01)
        buffers = sum(buffer.nbytes for buffer in model.norm.buffers())
        assert owned <= read <= owned + buffers + 2 * 64 * 4  # the rows in which a slice begins and ends
        assert kept  # the optimizer's states stay
        assert all(torch.equal(found[name], values) for name, values in weights.items())
        assert found["norm.num_batches_tracked"] == 1


def load_cut(mesh: zs.Mesh, path: str) -> Any:
    """The state dict of a model in two stages after loading."""
    plan = zs.Plan(pipeline_parallel=zs.Pipeline(2, balance="parameters"), microbatches=2)
    example = (batch(0, 0, 1, 2), 0)
    engine = zs.Engine(build("TiedFive", seed=mesh.rank), torch.optim.AdamW, plan, mesh=mesh, example=example)
    engine.load_weights(path)
    return engine.state_dict()


def test_each_stage_reads_its_layers(pool: Pool, tmp_path: Path) -> None:
    weights = build("TiedFive", seed=7).state_dict()
    save_file({name: values.clone() for name, values in weights.items()}, tmp_path / "w.safetensors")  # the tied twice
    for found in pool.run(load_cut, 2, str(tmp_path / "w.safetensors")):
        assert all(torch.equal(found[name], values) for name, values in weights.items())


def load_checkpoint(mesh: zs.Mesh, save: bool, path: str) -> Any:
    """Save under one plan, or load the weights under another."""
    plan = zs.Plan(zero=3) if save else zs.Plan(zero=1, precision="bf16", fp32_modules=("BatchNorm1d",))
    engine = zs.Engine(Normed(), torch.optim.AdamW, plan, mesh=mesh)
    if save:
        engine.save(path, wait=True)
    else:
        engine.load_weights(path)
    return engine.state_dict()


def test_weights_of_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run(load_checkpoint, 2, True, str(tmp_path / "c"))[0]
    found = pool.run(load_checkpoint, 1, False, str(tmp_path / "c"))[0]
    assert all(torch.equal(values, saved[name].to(values.dtype)) for name, values in found.items())


def refusal(mesh: zs.Mesh, path: str) -> str:
    """What a rank is told."""
    with pytest.raises(CheckpointError) as caught:
        load(mesh, {"zero": 2}, path)
    return str(caught.value)


def test_weights_of_another_model_are_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    weights = gpt2(0, whole=False).state_dict()
    save_file(weights | {"odd": torch.zeros(1)}, tmp_path / "a.safetensors")
    for message in pool.run(refusal, 2, str(tmp_path / "a.safetensors")):
        assert "holds 'odd', which the model does not have" in message
    save_file(weights | {"wpe.weight": torch.zeros(31, 12)}, tmp_path / "b.safetensors")
    for message in pool.run(refusal, 2, str(tmp_path / "b.safetensors")):
        assert "'transformer.wpe.weight' is (31, 12) there and (32, 12) here" in message
