"""Mixtures on several ranks train like one process: losses, norms, weights, and what the tables say."""

import functools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from inside import parts_of
from pool import Pool
from selection import by_default

import zeroshard as zs
from moe.mixed import EXPERTS, HIDDEN, WIDTH, batch, build, engine_of, follow, follow_all, optimizer, plain, take
from zeroshard.moe.exchange import technique
from zeroshard.moe.exchange.exchange import Exchanged
from zeroshard.moe.experts.weight_gradients import StackGradient
from zeroshard.parts.axes import Axes
from zeroshard.pipeline.run.chunks import Chunks
from zeroshard.step.context import WeightGradients
from zeroshard.zero.byte_formulas import BytesPerParameter, StateBytes, state_bytes

STEPS = 3
Settings = Mapping[str, Any]
STAGES = {"pipeline_parallel": 2, "microbatches": 2}
EP2, EP4 = {"expert_parallel": 2}, {"expert_parallel": 4}
STACKED = {"kind": "learned"}
STARVED = {"kind": "starved", "modules": True}
ONE = {"kind": "one"}


def balanced_exchange(tokens: int, choices: int, width: int, ranks: int) -> Exchanged:
    """T tokens of each rank with k choices, which fall on all ranks alike: k·T·(n-1)/n rows out and as many back."""
    rows = choices * tokens * (ranks - 1) // ranks
    return Exchanged(rows, rows, width)


def states_of(
    dense: int,
    experts: int,
    expert_ranks: int,
    ranks: int,
    zero: int,
    each: BytesPerParameter = BytesPerParameter(),
) -> StateBytes:
    """Model states of one rank: dense ones among all N, those of its experts among the N/e that have the same.

    Args:
        dense: parameters of everything else.
        experts: parameters of all experts, which the ranks divide.
        expert_ranks: e.
        ranks: N, of the data.
    """
    own = Fraction(experts, expert_ranks)
    return state_bytes(dense, ranks, zero, each) + state_bytes(own, ranks // expert_ranks, zero, each)


@functools.cache
def wanted(model: tuple[tuple[str, Any], ...], data_ranks: int, microbatches: int, clip: float | None) -> Any:
    """As `plain`, once for each case."""
    return plain(dict(model), data_ranks, STEPS, clip, microbatches)


def same(seen: Sequence[Mapping[str, Any]], model: Settings, plan: Settings, data_ranks: int, to: float = 1e-6) -> None:
    """Every rank knows the norms and weights of a loop in one process; the ranks' losses are its losses."""
    expected = wanted(tuple(model.items()), data_ranks, plan.get("microbatches", 1), plan.get("clip_norm"))
    losses = zip(*(mine["losses"] for mine in seen), strict=True)
    assert [sum(each) / len(each) for each in losses] == pytest.approx(expected["losses"], rel=to), (model, plan)
    for mine in seen:
        assert mine["norms"] == pytest.approx(expected["norms"], rel=to), (model, plan)
        assert mine["weights"].keys() == expected["weights"].keys()
        for name, value in expected["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=to, atol=to)
        for table in ("wire", "memory"):
            rows = {name: pair for name, pair in mine[table].items() if pair[0] is not None}
            assert {k: p for k, (p, _) in rows.items()} == {k: m for k, (_, m) in rows.items()}, (model, plan, table)


LAID_OUT: dict[str, tuple[int, Settings, int]] = {
    "1 x 2": (2, {}, 2),
    "2 x 1": (2, EP2, 2),
    "2 x 2": (4, EP2, 4),
    "4 x 1": (4, EP4, 4),
    "1 x 1 in 2 stages": (2, STAGES, 1),
    "2 x 1 in 2 stages": (4, {**STAGES, **EP2}, 2),
}


@pytest.mark.parametrize("zero", by_default([0, 1, 2, 3], 0, 2, 3))
@pytest.mark.parametrize("layout", by_default(LAID_OUT, "2 x 2", "4 x 1", "2 x 1 in 2 stages"))
def test_experts_x_data_ranks_train_like_one_process(pool: Pool, layout: str, zero: int, whole: bool) -> None:
    """6 experts on 4 ranks are 2, 2, 1 and 1."""
    ranks, plan, data_ranks = LAID_OUT[layout]
    network = {**plan, "zero": zero, "transport": "network", "clip_norm": 0.5}
    runs = [(STACKED, network), (ONE, {**plan, "zero": zero}), *([(STARVED, network)] if whole else ())]
    answers = pool.run(follow_all, ranks, runs, STEPS)
    for number, (model, settings) in enumerate(runs):
        seen = [answer[number] for answer in answers]
        same(seen, model, settings, data_ranks)
    experts = plan.get("expert_parallel", 1)
    shapes = [answer[0]["shapes"]["blocks.0.mixture.experts.up"][0] for answer in answers]
    assert shapes == [EXPERTS // experts + (rank % experts < EXPERTS % experts) for rank in range(ranks)]


@pytest.mark.whole
@pytest.mark.parametrize(
    "ranks, model, plan, data_ranks",
    [
        (8, STACKED, {**EP4, "zero": 3}, 8),
        (8, STARVED, {**STAGES, **EP2, "zero": 2}, 4),
        (8, {**STACKED, "summed": True}, {**STAGES, **EP4, "zero": 1}, 4),
        (6, {**STACKED, "experts": 7}, {"expert_parallel": 3, "zero": 3}, 6),
    ],
    ids=["4 x 2", "2 x 2 in 2 stages", "4 x 1 in 2 stages", "3 x 2"],
)
def test_up_to_eight_ranks(wide_pool: Pool, ranks: int, model: Settings, plan: Settings, data_ranks: int) -> None:
    seen = wide_pool.run(follow, ranks, model, plan, STEPS)
    same([{**mine, "losses": mine["losses"]} for mine in seen], model, plan, data_ranks)


OTHERS = {
    "groups": (4, STACKED, {**EP2, "zero": 2, "shard_group": 2}, 4),
    "groups of 4 ranks": (4, STACKED, {**EP4, "zero": 2, "shard_group": 2}, 4),
    "sums": (4, {**STACKED, "summed": True}, {**EP2, "zero": 2, "microbatches": 2}, 4),
    "sums in stages": (4, {**STACKED, "summed": True}, {**STAGES, **EP2, "zero": 1}, 2),
    "accumulation": (4, STARVED, {**EP4, "zero": 3, "microbatches": 2}, 4),
    "one reduction": (2, STACKED, {**EP2, "zero": 1, "microbatches": 2, "reduce_every": "step"}, 2),
    "checkpointed": (4, {**STARVED, "checkpointed": True}, {**EP4, "zero": 3}, 4),
    "recomputed": (4, {**ONE, "summed": True}, {**STAGES, **EP2, "pipeline_parallel.schedule": "gpipe"}, 2),
    "interleaved": (
        4,
        {**STACKED, "blocks": 4, "summed": True},
        {**STAGES, **EP2, "pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 2},
        2,
    ),
    "offloaded states": (4, STARVED, {**EP2, "zero": 2, "offload": "optimizer"}, 4),
    "offloaded states, none on one rank": (
        4,
        {"kind": "learned", "modules": True, "frozen": True},
        {**EP4, "zero": 2, "offload": "optimizer"},
        4,
    ),
    "more of the states offloaded on ranks with one expert": (  # a block has 0.44 or 0.42 of the parameters
        4,
        STACKED,
        {**EP4, "zero": 1, "offload": "optimizer", "offload.fraction": 0.43},
        4,
    ),
    "offloaded parameters": (2, STACKED, {**EP2, "zero": 3, "offload": "optimizer,parameters"}, 2),
    "offloaded activations": (2, STACKED, {**EP2, "zero": 1, "offload": "activations"}, 2),
    "late gathers": (4, STACKED, {**EP2, "zero": 1, "overlap_gather": True, "transport": "network"}, 4),
}  # fmt: skip


SHOWN = (
    "groups",
    "sums in stages",
    "one reduction",
    "offloaded states, none on one rank",
    "more of the states offloaded on ranks with one expert",
    "offloaded parameters",
    "offloaded activations",
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_with_other_techniques(pool: Pool, ranks: int, whole: bool) -> None:
    cases = [OTHERS[name] for name in (OTHERS if whole else SHOWN) if OTHERS[name][0] == ranks]
    answers = pool.run(follow_all, ranks, [(model, plan) for _, model, plan, _ in cases], STEPS)
    for number, (_, model, plan, data_ranks) in enumerate(cases):
        same([answer[number] for answer in answers], model, plan, data_ranks)


TENSOR = {"tensor_parallel": 2}
LAYOUTS = {  # of Switch's figure 9 (2101.03961, section 5), and more
    "data": ({"zero": 1}, 4),
    "model": ({"tensor_parallel": 4, "zero": 0}, 1),
    "model and data": ({**TENSOR, "zero": 2}, 2),
    "expert and data": ({**EP4, "zero": 1}, 4),
    "expert, model and data": ({**TENSOR, **EP4, "zero": 3, "transport": "network"}, 2),
    "experts twice among ranks that split a layer": ({"tensor_parallel": 4, **EP2, "zero": 2}, 1),
    "whole sequences": ({"tensor_parallel.ranks": 2, "tensor_parallel.sequence": False, **EP2, "zero": 1}, 2),
    "stages": ({**STAGES, **TENSOR, **EP2, "zero": 1}, 1),
}
SHOWN_LAYOUTS = ("expert, model and data", "experts twice among ranks that split a layer", "stages")


MODELS = [STACKED, {**STARVED, "summed": True}]


@pytest.mark.parametrize("model", by_default(MODELS, MODELS[1]), ids=["stacked", "modules"])
def test_all_layouts_agree_on_one_script(pool: Pool, model: Settings, whole: bool) -> None:
    layouts = [LAYOUTS[name] for name in (LAYOUTS if whole else SHOWN_LAYOUTS)]
    answers = pool.run(follow_all, 4, [(model, plan) for plan, _ in layouts], STEPS)
    for number, (plan, data_ranks) in enumerate(layouts):
        same([answer[number] for answer in answers], model, plan, data_ranks)


SPLIT = {**STAGES, **EP2, "pipeline_parallel.schedule": "zb-h1", "microbatches": 4}


def test_split_backwards_leave_the_weight_gradients_of_experts(pool: Pool) -> None:
    """All products of experts are made after the gradients of inputs, in the second part of a backward."""
    each = {**SPLIT, "recompute": "blocks", "zero": 1, "reduce_every": "microbatch"}
    runs = [({**STACKED, "summed": True}, {**SPLIT, "zero": 3}), (STACKED, each)]
    answers = pool.run(follow_split, 4, runs)
    for number, (model, plan) in enumerate(runs):
        same([answer[number][0] for answer in answers], model, plan, 2)
    assert [made for answer in answers for _, made in answer] == [{"W": 2 * 4 * STEPS}] * 8


def follow_split(mesh: zs.Mesh, runs: Sequence[tuple[Settings, Settings]]) -> list[tuple[dict[str, Any], Any]]:
    """As `follow`, and how many gradients of stacked weights each part of a backward made; without a warning.

    No reduction is under way where a part begins, so that no rank waits inside of it for one that waits in a layer.
    """
    part, made, found = ["I"], Counter[str](), []
    compute, finish, backward = WeightGradients.compute, StackGradient.finish, Chunks.backward

    def counted(self: StackGradient, counts: Sequence[int]) -> Any:
        made[part[0]] += self._each[0].dim() > 1
        return finish(self, counts)

    def later(self: WeightGradients) -> None:
        part[0] = "W"
        compute(self)
        part[0] = "I"

    def begun(self: Chunks, action: Any) -> None:
        backward(self, action)
        assert not any(each.gradients.reduction.in_flight for each in self._parts[action.chunk] if each.gradients)

    patches = patch.object(StackGradient, "finish", counted), patch.object(WeightGradients, "compute", later)
    with patches[0], patches[1], patch.object(Chunks, "backward", begun), warnings.catch_warnings():
        warnings.filterwarnings("error", "schedule='zb-h1' leaves")
        for model, plan in runs:
            found.append((follow(mesh, model, plan, STEPS), +made))
            made.clear()
    return found


def over_the_wrong_ranks(mesh: zs.Mesh, how: str) -> list[float]:
    """The norms where gradients are divided, or experts' slices counted, as if they were those of dense layers."""
    real = Axes._place

    def wrong(self: Axes, kind: Any) -> Any:
        place = real(self, kind)
        if kind.axis is None:
            return place
        if how == "mean over copies":  # the fault "gradient x EP"
            object.__setattr__(place, "divisor", place.slices.size)
        else:
            object.__setattr__(place, "counted", mesh.rank < 2)
        return place

    with patch.object(Axes, "_place", wrong):
        return [each.grad_norm for each in take(engine_of(mesh, STACKED, {**EP4, "zero": 2}), 0, STEPS)]


@pytest.mark.parametrize("how", ["mean over copies", "counted on some ranks"])
def test_a_mean_over_the_wrong_ranks_would_be_seen(pool: Pool, how: str) -> None:
    norms = wanted(tuple(STACKED.items()), 4, 1, None)["norms"]
    for found in pool.run(over_the_wrong_ranks, 4, how):
        assert all(abs(a / b - 1) > 1e-4 for a, b in zip(found, norms, strict=True))


def save(mesh: zs.Mesh, model: Settings, plan: Settings, folder: str) -> list[float]:
    """Save after some steps, and go on for two."""
    engine = engine_of(mesh, model, plan)
    take(engine, 0, STEPS)
    engine.save(f"{folder}/{plan['expert_parallel']}", wait=True)
    return [each.grad_norm for each in take(engine, STEPS, STEPS + 2)]


def load(mesh: zs.Mesh, model: Settings, plans: Sequence[Settings], folder: str) -> list[Any]:
    """The weights and the norms of two steps after loading, under each plan; the momentum of one expert."""
    found = []
    for plan in plans:
        engine = engine_of(mesh, model, plan, seed=9)
        engine.load(folder)
        weights = engine.state_dict()
        found.append((weights, [each.grad_norm for each in take(engine, STEPS, STEPS + 2)]))
    return found


@pytest.mark.parametrize("model", by_default([STACKED, STARVED], STACKED), ids=["stacked", "modules"])
def test_checkpoints_load_under_any_number_of_expert_ranks(
    pool: Pool, tmp_path: Path, model: Settings, whole: bool
) -> None:
    """Global shapes on disk: from 4 ranks with 2, 2, 1 and 1 experts, and from 2, to all others."""
    for experts in (4, 2) if whole else (4,):
        plan = {"expert_parallel": experts, "zero": 3, "transport": "network"}
        (norms, *_) = pool.run(save, 4, model, plan, str(tmp_path))
        plans = [plan, {"expert_parallel": 6 - experts, "zero": 1}, {"zero": 2}]
        expected = plain(model, 4, STEPS)["weights"]
        for answer in pool.run(load, 4, model, plans, f"{tmp_path}/{experts}"):
            for number, (weights, after) in enumerate(answer):
                assert after == norms if number == 0 else after == pytest.approx(norms, rel=1e-6)
                for name, value in expected.items():
                    assert torch.equal(weights[name], answer[0][0][name])
                    torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
        ((weights, _),) = pool.run(load, 1, model, [{}], f"{tmp_path}/{experts}")[0]
        assert all(torch.equal(weights[name], answer[0][0][name]) for name in expected)


def load_weights(mesh: zs.Mesh, folder: str) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, and a state dict that is given whole."""
    engine = engine_of(mesh, STACKED, {**EP2, "zero": 3}, seed=5)
    engine.load_weights(folder)
    state = engine.state_dict()
    other = engine_of(mesh, STACKED, {**EP2, "zero": 1}, seed=6)
    other.load_state_dict(state)
    assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())
    return state


def test_weights_are_given_whole(pool: Pool, tmp_path: Path) -> None:
    pool.run(save, 4, STACKED, {**EP4, "zero": 2}, str(tmp_path))
    first, *others = pool.run(load_weights, 2, f"{tmp_path}/4")
    expected = plain(STACKED, 4, STEPS)["weights"]
    for state in (first, *others):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def damage(mesh: zs.Mesh) -> str:
    """One rank's copy of an expert differs; the error of the comparison."""
    engine = engine_of(mesh, STACKED, {**EP2, "zero": 1, "transport": "network"})
    take(engine, 0, 1)
    if mesh.rank == 3:
        with torch.no_grad():
            for part in (part for part in parts_of(engine).all if part.splits):
                part.weights.full[0] += 1
    with pytest.raises(zs.errors.DivergenceError) as error:
        engine.check_replicas()
    return str(error.value)


def test_copies_of_experts_are_compared(pool: Pool) -> None:
    for text in pool.run(damage, 4):
        assert "mixture.experts" in text and "rank 1 against rank 3" in text


def two_levels(mesh: zs.Mesh, model: Settings, plan: Settings) -> dict[str, Any]:
    """A run on two machines, as far as messages know."""
    with patch.object(technique, "machine", lambda: [str(mesh.rank // 2)]):
        return follow(mesh, model, plan, STEPS)


def test_two_levels_train_like_one(pool: Pool) -> None:
    plan = {"expert_parallel.ranks": 4, "expert_parallel.two_level": True, "zero": 2}
    same(pool.run(two_levels, 4, STARVED, plan), STARVED, plan, 4)


def test_tensor_ranks_split_what_a_block_computes_around_its_mixture(pool: Pool) -> None:
    """Its forward is tried without the exchange of rows."""
    model, plan = {**STACKED, "inlined": True}, {**TENSOR, **EP2, "zero": 1}
    seen = pool.run(follow, 2, model, plan, STEPS)
    same(seen, model, plan, 1)
    assert {mine["shapes"]["blocks.1.up.weight"] for mine in seen} == {(HIDDEN // 2, WIDTH)}


def scaled(mesh: zs.Mesh, model: Settings, name: str, plan: Settings) -> Any:
    """The weights of experts after two steps, with a hook on their gradient that was there before the engine."""
    net = build(model)
    net.get_parameter(name).register_hook(lambda gradient: gradient * 0.3)
    engine = zs.Engine(net, optimizer, zs.Plan.from_dict(plan), mesh=mesh, loss=lambda output, _: output)
    take(engine, 0, 2)
    return engine.state_dict()[name]


@pytest.mark.parametrize(
    "model, name",
    [
        (STACKED, "blocks.1.mixture.experts.up"),
        ({"kind": "learned", "modules": True}, "blocks.1.mixture.experts.networks.0.0.weight"),
    ],
    ids=["stacked", "modules"],
)
def test_hooks_of_experts_stay(pool: Pool, model: Settings, name: str) -> None:
    apart, together = (pool.run(scaled, 2, model, name, plan)[0] for plan in (EP2, {}))
    torch.testing.assert_close(apart, together, rtol=1e-6, atol=1e-6)


def overflow(mesh: zs.Mesh) -> list[bool]:
    """Whether steps are skipped on this rank, where one rank's experts overflow in the second."""
    engine = engine_of(mesh, {"kind": "by row"}, {**EP4, "zero": 2, "nonfinite": "skip"})
    found = []
    for step in range(STEPS):
        hooks = []
        if step == 1 and mesh.rank == 2:
            experts = engine.model.blocks[1].mixture.experts
            hooks = [experts.up.register_hook(lambda gradient: gradient * float("inf"))]
        found.append(engine.train_step(batch(step, engine.data_rank)).skipped)
        for hook in hooks:
            hook.remove()
    return found


def test_all_ranks_skip_a_step_in_which_one_overflows(pool: Pool) -> None:
    assert pool.run(overflow, 4) == [[False, True, False]] * 4


def balanced(mesh: zs.Mesh, plan: Settings) -> dict[str, tuple[int, int]]:
    """What a step sends where each row of a batch goes to two experts of its own."""
    engine = engine_of(mesh, {"kind": "by row"}, plan)
    engine.train_step(batch(0, engine.data_rank, rows=3))
    found = {row.purpose: row for row in engine.traffic()}
    return {
        name: (found[name].measured_elements, found[name].sent_bytes) for name in ("exchange tokens", "count tokens")
    }


@pytest.mark.parametrize("transport", ["network", "shared"])
def test_bytes_of_the_exchange_are_those_of_the_formula(pool: Pool, transport: str) -> None:
    """k·T·(4·d + 2)·(n-1)/n in each layer: rows there and back, in both passes, and gates; and n·E counts."""
    tokens, choices, layers, ranks = 3 * 5, 2, 2, 2
    rows = choices * tokens * (4 * WIDTH + 2) * (ranks - 1) // ranks * layers
    formula = balanced_exchange(tokens, choices, WIDTH, ranks)
    assert layers * (formula.forward + formula.backward) == rows
    for found in pool.run(balanced, ranks, {**EP2, "zero": 2, "transport": transport}):
        assert found["exchange tokens"] == (rows, 4 * rows if transport == "network" else 0)
        assert found["count tokens"][0] == layers * ranks * EXPERTS


def states(mesh: zs.Mesh, plans: Sequence[Settings]) -> list[tuple[int, int, dict[str, int]]]:
    """Parameters of dense layers and of experts, and the ledger's bytes of states without padding, under each plan."""
    found = []
    for plan in plans:
        whole = {name: p.numel() for name, p in build(STACKED).named_parameters()}
        experts = sum(numel for name, numel in whole.items() if ".experts." in name)
        engine = engine_of(mesh, STACKED, plan)
        take(engine, 0, 1)
        rows = engine.memory()
        held = {row.category: int(row.measured_bytes - (row.padding_bytes or 0)) for row in rows if row.planned_bytes}
        found.append((sum(whole.values()) - experts, experts, held))
    return found


@pytest.mark.parametrize("ranks, experts", [(4, 2), (2, 2)])
def test_memory_of_states_is_that_of_the_formula(pool: Pool, ranks: int, experts: int) -> None:
    """SGD with momentum in fp32: 12 bytes a parameter, of experts among the ranks that hold the same."""
    plans = [{"zero": zero, "expert_parallel": experts, "transport": "network"} for zero in range(4)]
    for answers in pool.run(states, ranks, plans):
        for zero, (dense, of_experts, held) in enumerate(answers):
            wanted = states_of(dense, of_experts, experts, ranks, zero, BytesPerParameter(4, 4, 0, 4))
            assert held["parameters"] == wanted.parameters
            assert held["gradients"] == wanted.gradients
            assert held["optimizer states"] == wanted.optimizer_states


def test_a_mixture_outside_of_the_units_of_a_pipeline_trains_like_one_process(pool: Pool) -> None:
    model, plan = {**STACKED, "blocks": 3}, {**STAGES, "units": ("blocks.0", "blocks.1"), "transport": "network"}
    same([answer[0] for answer in pool.run(follow_all, 2, [(model, plan)], STEPS)], model, plan, 1)
