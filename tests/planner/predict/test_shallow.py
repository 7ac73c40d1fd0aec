"""Few blocks for many, and tensors with values where those without lie: against runs of the whole on real tensors."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from planner.rehearsed import SHAPE, run_peak, task
from selection import by_default
from torch import nn

import zeroshard as zs
from zeroshard.doctor.hardware import Device, Link, Machines
from zeroshard.planner.predict.cuts import layers_of
from zeroshard.planner.predict.predict import predict, predict_timed
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse
from zeroshard.planner.predict.shallow import Stack, deepen, probes, stacks_of
from zeroshard.planner.search.search import search
from zeroshard.train.gpt import GPT, Block

CPU = Device("some CPU", "cpu", 2**36, {"fp32": 5e10}, 1e10, 5e-6)  # no rounding, so that bytes can be compared
ALONE = Machines(CPU, 1, 1, Link(1e9), Link(1e9))
PAIR = Machines.of("A100-80", 2)
TEXT: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
                        "intermediate_size": 128, "max_position_embeddings": 64, "use_cache": False}  # fmt: skip

EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 32},
    "DeepseekV3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 2,
                   "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                   "qk_nope_head_dim": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}  # fmt: skip


def six_blocks() -> nn.Module:
    with torch.device("meta"):
        return GPT(type(SHAPE)(**{**vars(SHAPE), "layers": 6}))


FEW: list[dict[str, Any]] = [
    {"zero": 3, "precision": "bf16"},
    {"zero": 0, "precision": "bf16", "tensor_parallel": 2, "microbatches": 6},
    {"zero": 1, "microbatches": 6, "reduce_every": "step"},
    {"zero": 3, "recompute": "blocks"},
    {"zero": 0, "recompute": "sqrt"},  # whose blocks are all rehearsed, since they do not cost alike
    {"zero": 2, "recompute": "selective", "precision": "bf16"},
    {
        "pipeline_parallel": 2,
        "pipeline_parallel.schedule": "1f1b",
        "zero": 0,
        "microbatches": 6,
        "pipeline_parallel.balance": "parameters",
    },
]


@pytest.mark.parametrize("plan", by_default(FEW, FEW[2]), ids=str)
def test_few_blocks_and_microbatches_tell_all(plan: dict[str, Any]) -> None:
    job = task(build=six_blocks, rows=12)
    rows = 6 if "pipeline_parallel" not in plan else 12
    few, whole = (predict(job, zs.Plan.from_dict(plan), PAIR, rows, deep=deep) for deep in (False, True))
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=1e-3)
    assert few.wire_bytes == whole.wire_bytes
    assert few.seconds == pytest.approx(whole.seconds, rel=0.02)


def test_a_chain_of_equal_blocks_is_cut_by_few_of_them() -> None:
    layers = layers_of(task(build=six_blocks), PAIR, 1)
    assert layers.names == tuple(f"blocks.{number}" for number in range(6))
    assert len({layer.forward_seconds for layer in layers.costs[1:-1]}) == 1
    assert layers.costs[-1].forward_seconds > layers.costs[1].forward_seconds  # the head is in it
    assert layers.split(1) == ()
    split = layers.split(2)
    found = zs.Plan(pipeline_parallel=zs.Pipeline(2, split=split), zero=0, microbatches=2)
    assert predict(task(build=six_blocks, rows=4), found, PAIR, 4).plan.pipeline.split == split


def test_depths_are_extrapolated_stack_by_stack() -> None:
    model = nn.ModuleDict({"a": nn.ModuleList(nn.Linear(3, 3) for _ in range(9)),
                           "b": nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))})  # fmt: skip
    stacks = stacks_of(model)
    assert [(stack.path, stack.depth) for stack in stacks] == [("a", 9), ("b", 6)]

    def seen(depths: dict[str, int]) -> dict[str, float]:
        return {"bytes": 100 + 7 * depths["a"] + 11 * depths["b"]}

    assert deepen(stacks, [seen(depths) for depths in probes(stacks)]) == {"bytes": 100 + 7 * 9 + 11 * 6}


class Wide(nn.Module):
    """A block of two layers around a residual."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, inner), nn.Linear(inner, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(nn.functional.gelu(self.into(x)))


class Unlike(nn.Module):
    """Wide blocks, then equal narrow ones, as DeepSeek-V3 has dense blocks before its mixtures."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        sizes = [128] * wide + [64] * narrow
        self.embed = nn.Embedding(300, 64)
        self.layers = nn.ModuleList(map(Wide, sizes))
        self.head = nn.Linear(64, 300)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def unlike(wide: int = 3, narrow: int = 13) -> nn.Module:
    with torch.device("meta"):
        return Unlike(wide, narrow)


def test_blocks_unlike_those_at_the_end_are_kept() -> None:
    assert stacks_of(unlike()) == [Stack("layers", 13, 3)]
    assert stacks_of(unlike(9, 4)) == []
    assert probes(stacks_of(unlike())) == [{"layers": 7}, {"layers": 8}]
    layers = layers_of(task(build=unlike), PAIR, 1)
    assert layers.names == tuple(f"layers.{number}" for number in range(16))
    wide, narrow = layers.costs[1].parameter_bytes, layers.costs[3].parameter_bytes
    assert [one.parameter_bytes for one in layers.costs[1:-1]] == [wide, wide, *[narrow] * 12] and wide > 1.9 * narrow


CUTS = [("8",), ("9",), ("3",), ("4", "8", "12"), ("2", "7", "12")]  # in the last, stages between have a wide block


@pytest.mark.parametrize("cut", [(), *by_default(CUTS, CUTS[3], CUTS[4])], ids=str)
def test_few_of_the_equal_blocks_tell_all_beside_others(cut: tuple[str, ...]) -> None:
    job, split = task(build=unlike, rows=16), tuple(f"layers.{name}" for name in cut)
    pipeline = {"pipeline_parallel.stages": len(cut) + 1, "pipeline_parallel.split": split} if cut else {}
    plan = zs.Plan(zero=0, microbatches=8).with_settings(pipeline)
    few, whole = (predict(job, plan, replace(PAIR, count=max(1, len(cut) + 1)), 16, deep) for deep in (False, True))
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)  # 4 KiB for each block of other stages
    assert few.rank == whole.rank
    assert few.wire_bytes == whole.wire_bytes and few.phases.keys() == whole.phases.keys()
    assert few.seconds == pytest.approx(whole.seconds, rel=0.1)  # and about one launch in each microbatch


def made_whole() -> nn.Module:
    return GPT(replace(SHAPE, layers=10))


COMBINED: list[dict[str, Any]] = [
    {"pipeline_parallel": 2, "tensor_parallel": 2, "microbatches": 8},
    {"pipeline_parallel": 2, "microbatches": 8, "zero": 1, "recompute": "blocks"},
    {"pipeline_parallel": 2, "microbatches": 8, "zero": 1, "precision": "bf16", "offload": "optimizer"},
    {"pipeline_parallel": 4, "microbatches": 16, "precision": "bf16"},
    {"pipeline_parallel": 2, "pipeline_parallel.schedule": "gpipe", "microbatches": 6, "recompute": "blocks"},
    {"tensor_parallel": 2, "zero": 3, "precision": "bf16", "recompute": "blocks"},
    {"tensor_parallel": 4, "zero": 0, "microbatches": 4, "recompute": "selective"},
    {"zero": 3, "offload": ("optimizer", "parameters"), "precision": "bf16", "microbatches": 2},
    {"zero": 2, "offload": "optimizer", "recompute": "blocks", "precision": "bf16"},
    {"zero": 1, "offload": "activations", "microbatches": 4},
    {"zero": 3, "loss_chunk": 32, "precision": "bf16", "reduce_every": "step", "microbatches": 5},
]


@pytest.mark.parametrize("device", ["A100-80", pytest.param("cpu", marks=pytest.mark.whole)])
@pytest.mark.parametrize("settings", by_default(COMBINED, COMBINED[0]), ids=str)
def test_few_blocks_tell_every_phase_of_a_model_made_in_host_memory(settings: dict[str, Any], device: str) -> None:
    machines = replace(PAIR, count=4, per_node=4, device=CPU if device == "cpu" else PAIR.device)
    job = replace(task(build=made_whole, rows=80), made_aside="whole")
    plan = zs.Plan.from_dict({"zero": 0, **settings})
    rows = 80 // (4 // plan.pipeline.stages // plan.tensor.ranks)
    few, whole = (predict(job, plan, machines, rows, deep) for deep in (False, True))
    assert few.phases.keys() == whole.phases.keys()
    for phase, memory in whole.phases.items():
        assert sum(few.phases[phase].values()) == pytest.approx(sum(memory.values()), rel=0.01), phase
    assert few.host_bytes == pytest.approx(whole.host_bytes, rel=0.01)


def causal_model(kind: str, recomputes: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    more: dict[str, Any] = {"num_key_value_heads": 2, "pad_token_id": 0}
    more |= EXPERTS.get(kind, {})
    if kind == "GPT2":
        shape = {"vocab_size": 300, "n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 64, "use_cache": False}
        config = transformers.GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        config = getattr(transformers, f"{kind}Config")(**TEXT, **more)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    if recomputes:
        enable: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model


def words(rows: int) -> dict[str, torch.Tensor]:
    drawn = torch.randint(2, 300, (rows, 48))
    return {"input_ids": drawn, "labels": drawn}


KINDS = [("GPT2", False), ("GPT2", True), ("Llama", False), ("Llama", True), ("Qwen2", True)]
KINDS += [(kind, False) for kind in EXPERTS]


@pytest.mark.parametrize(
    "case",
    by_default(KINDS, ("GPT2", True), ("Llama", False)),
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def test_models_of_transformers_within_a_percent(case: tuple[str, bool]) -> None:
    kind, recomputes = case
    make = partial(torch.optim.AdamW, lr=1e-3)
    plan = zs.Plan(zero=0)
    job = TrainingTask(partial(causal_model, kind, recomputes), words, make, 8, 48)
    predicted = predict(job, plan, ALONE, 8)
    assert predicted.mode == "fake"
    assert predicted.peak_bytes == pytest.approx(run_peak(job, plan, 8), rel=0.01)


@pytest.mark.parametrize("kind", by_default(EXPERTS, "Qwen3Moe"))
def test_mixtures_are_cut_and_rehearsed_without_values(kind: str) -> None:
    """Their grouped product is in fp32, and torch's own stand-in for it refuses all but bf16."""
    job = TrainingTask(partial(causal_model, kind, False), words, partial(torch.optim.AdamW, lr=1e-3), 2, 48)
    assert len(layers_of(job, PAIR, 1).names) == 6
    without = rehearse(job, zs.Plan(zero=0), 0, 1, 2)
    with_values = rehearse(replace(job, values=True), zs.Plan(zero=0), 0, 1, 2)
    assert without.states == with_values.states
    assert without.peak_bytes == pytest.approx(with_values.peak_bytes, rel=0.005)


def blocks_run(plan: dict[str, Any], layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many blocks' forwards a prediction takes."""
    calls = 0
    forward = Block.forward

    def counted(block: Block, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(block, x)

    def build() -> nn.Module:
        with torch.device("meta"):
            return GPT(replace(SHAPE, layers=layers))

    with monkeypatch.context() as patch:
        patch.setattr(Block, "forward", counted)
        predict(task(build=build, rows=4), zs.Plan.from_dict(plan), PAIR, 4)
    return calls


@pytest.mark.whole
def test_a_stage_of_many_blocks_is_rehearsed_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [
        {"pipeline_parallel": 2, "zero": 0, "microbatches": 2, "pipeline_parallel.split": (f"blocks.{depth // 2}",)}
        for depth in (8, 16)
    ]
    assert blocks_run(plans[0], 8, monkeypatch) == blocks_run(plans[1], 16, monkeypatch)


# Just so many blocks and microbatches that not all are rehearsed; of gpipe, all microbatches are.
NINE: dict[str, Any] = {"microbatches": 6, "pipeline_parallel.split": ("blocks.4",)}
STAGED: dict[str, dict[str, Any]] = {
    "1f1b": {**NINE, "pipeline_parallel.schedule": "1f1b"},
    "gpipe": {**NINE, "pipeline_parallel.schedule": "gpipe", "microbatches": 2, "precision": "bf16"},
    "zb-h1": {**NINE, "pipeline_parallel.schedule": "zb-h1"},
    "interleaved": {
        "pipeline_parallel.schedule": "interleaved",
        "microbatches": 8,
        "pipeline_parallel.virtual_stages": 2,
        "pipeline_parallel.split": ("blocks.4", "blocks.7", "blocks.8"),
    },
    **{
        recompute: {**NINE, "pipeline_parallel.schedule": "1f1b", "recompute": recompute}
        for recompute in ("blocks", "sqrt", "selective")
    },
}


@pytest.mark.parametrize("name", by_default(STAGED, "interleaved"))
def test_few_blocks_of_a_stage_tell_all(name: str) -> None:
    plan, layers = STAGED[name], 12 if name == "interleaved" else 9

    def build() -> nn.Module:
        with torch.device("meta"):
            return GPT(replace(SHAPE, layers=layers))

    rows = plan["microbatches"]
    job, whole = task(build=build, rows=rows), zs.Plan.from_dict({"pipeline_parallel": 2, "zero": 0, **plan})
    few, all_of_them = (predict(job, whole, PAIR, rows, deep=deep) for deep in (False, True))
    assert few.plan == all_of_them.plan
    assert few.peak_bytes == pytest.approx(all_of_them.peak_bytes, rel=5e-3)
    assert few.wire_bytes == all_of_them.wire_bytes
    assert few.seconds == pytest.approx(all_of_them.seconds, rel=0.02)


LONG: list[dict[str, Any]] = [
    {"pipeline_parallel.schedule": "1f1b", "zero": 0},
    {"pipeline_parallel.schedule": "1f1b", "zero": 1, "precision": "bf16", "tensor_parallel": 2},
    {"pipeline_parallel.schedule": "zb-h1", "zero": 0},
]


@pytest.mark.whole
@pytest.mark.parametrize("fuller", [8, 4, 7], ids="stage {}".format)
@pytest.mark.parametrize("plan", LONG, ids=str)
def test_stages_of_a_long_pipeline_are_those_of_a_short_one(plan: dict[str, Any], fuller: int) -> None:
    """The first of nine stages has nine microbatches in flight, and one of them has two blocks."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return GPT(replace(SHAPE, layers=10))

    split = tuple(f"blocks.{number + (number > fuller)}" for number in range(1, 9))
    cut = {"pipeline_parallel": 9, "pipeline_parallel.split": split, "microbatches": 18}
    job, whole = task(build=build, rows=36), zs.Plan.from_dict({**cut, **plan})
    ranks = 9 * whole.tensor.ranks * (1 + whole.zero)
    machines = Machines.of("A100-80", ranks, per_node=2)
    short, long = (predict(job, whole, machines, 18, deep=deep) for deep in (False, True))
    assert (short.rank, short.plan) == (long.rank, long.plan)
    absent = 7 * 12 * 512  # the smallest allocation for each parameter of the blocks that the short one lacks
    assert short.memory == pytest.approx(long.memory, rel=1e-3, abs=absent)
    assert short.wire_bytes == long.wire_bytes
    assert short.seconds == pytest.approx(long.seconds, rel=0.05 if fuller == 7 else 0.03)  # others cost as the first


def test_pipelines_with_several_chunks_per_stage_are_rehearsed_with_all_their_stages() -> None:
    """The last of eight stages kept 45 % fewer bytes of activations in a pipeline of four."""
    long = zs.Pipeline(8, schedule="1f1b"), zs.Pipeline(8, schedule="interleaved", virtual_stages=2)
    assert [pipeline.rehearsed_stages(32) for pipeline in long] == [4, 8]
    assert [pipeline.rehearsed_length(3, pipeline.rehearsed_stages(32)) for pipeline in long] == [5, 8]


def test_a_timed_prediction_is_of_real_steps() -> None:
    found = predict_timed(task(), zs.Plan(zero=0), ALONE, 4)
    assert (found.mode, found.time_mode) == ("shallow-real", "shallow-real")
    assert found.causes["compute"] > found.causes["optimizer"] > 0
    assert found.memory == predict(task(), zs.Plan(zero=0), ALONE, 4, deep=True).memory


def test_training_waits_for_checkpoints_where_the_host_has_no_room_for_copies() -> None:
    for host, waits in ((10_000, True), (10_000_000, False)):
        found = search(task(rows=2), replace(PAIR, host_memory=host), plans=[(zs.Plan(zero=1), 1)])
        assert [one.as_dict()["waits_for_checkpoints"] for one in found.best] == [waits]
