"""One flipped bit in what several ranks have alike is found and named on every rank; clean runs are left alone."""

from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, batch, build
from inside import held_states, parts_of
from pipeline.pipelines import data
from pool import Pool

import zeroshard as zs
from zeroshard.errors import DivergenceError
from zeroshard.units import flat

NETWORK = {"transport": "network"}
HALF = {"precision": "bf16"}
PIPELINE = {
    "pipeline_parallel": 2,
    "microbatches": 2,
    "pipeline_parallel.balance": "parameters",
    "transport": "network",
}
UP = "blocks.1.up.weight"


def make(mesh: zs.Mesh, plan: dict[str, Any]) -> zs.Engine:
    example = (data(0, 0, 1, 2), 0) if plan.get("pipeline_parallel", 1) > 1 else None
    return zs.Engine(
        build("Attending" if "tensor_parallel" in plan else "TiedFive" if example else "Frozen"),
        lambda ps: OPTIMIZERS["adamw"]([p for p in ps if p.requires_grad]),
        zs.Plan.from_dict(plan),
        mesh=mesh,
        example=example,
    )


def step(engine: zs.Engine, number: int) -> None:
    rows = 12 if engine.mesh.ranks == 3 else 8
    engine.train_step((batch(number, engine.data_rank, engine.data_ranks, rows), number))


def place_of(engine: zs.Engine, name: str, what: str) -> torch.Tensor | None:
    """What this rank keeps of one parameter, if anything: its weights, fp32 masters, or a state of the optimizer."""
    for part in parts_of(engine).all:
        for entry in part.flat.index.entries:
            if entry.name != name:
                continue
            start, values = part.updater.start, part.updater.values
            if what == "weights":
                start, values = part.flat.index.interval(part.weights.rank)[0], part.weights.own
                if part.weights.copied:
                    start, values = 0, part.weights.full
            elif what != "masters":
                span = next(s for s in part.updater.spans if entry.offset < s.stop)
                start, values = span.start, held_states(engine)[span.tensor][what]
            low, high = max(start, entry.offset), min(start + values.numel(), entry.stop)
            return values[low - start : high - start] if low < high else None
    return None


def flip(mesh: zs.Mesh, plan: dict[str, Any], where: tuple[str, str], rank: int, bit: int) -> tuple[str, str]:
    """The error of this rank after one bit flipped on rank `rank`, and of the same bit flipped back, if any."""
    engine = make(mesh, plan)
    for number in range(2):
        step(engine, number)
        engine.check_replicas()

    def turn() -> None:
        values = place_of(engine, *where) if mesh.rank == rank else None
        if values is not None:
            raw = values.detach().view(torch.uint8)
            raw[bit // 8 % raw.numel()] ^= 1 << bit % 8

    turn()
    answers = []
    for _ in range(2):
        try:
            engine.check_replicas()
            answers.append("")
        except DivergenceError as error:
            answers.append(str(error))
        turn()
    step(engine, 2)  # the collectives are still in order
    return answers[0], answers[1]


HEAD, KEY = "head.weight", "blocks.1.attention.key.weight"
CASES: list[tuple[int, dict[str, Any], tuple[str, str], int, str]] = [
    (2, {"zero": 0, **NETWORK}, (UP, "weights"), 1, "parameter {}, rank 0 against rank 1"),
    (3, {"zero": 0}, (UP, "weights"), 0, "parameter {} on rank 0, where ranks 1, 2 agree"),
    (2, {"zero": 0}, (HEAD, "exp_avg_sq"), 0, "exp_avg_sq of {}, rank 0 against rank 1"),
    (3, {"zero": 0, **HALF}, (HEAD, "masters"), 2, "master weights of {} on rank 2, where ranks 0, 1 agree"),
    (2, {"zero": 1, **NETWORK}, ("embed.weight", "weights"), 1, "parameter {}, rank 0 against rank 1"),
    (3, {"zero": 2, **NETWORK, **HALF}, (HEAD, "weights"), 1, "parameter {} on rank 1, where ranks 0, 2 agree"),
    (4, {"zero": 1, "shard_group": 2, **NETWORK}, (HEAD, "weights"), 3, "parameter {}, rank 2 against rank 3"),
    (4, {"zero": 2, "shard_group": 2, **HALF}, (HEAD, "weights"), 0, "parameter {}, rank 0 against rank 2"),
    (4, {"zero": 3, "shard_group": 2, **NETWORK}, (HEAD, "weights"), 2, "parameter {}, rank 0 against rank 2"),
    (4, {"zero": 2, "shard_group": 2}, (HEAD, "exp_avg"), 1, "exp_avg of {}, rank 1 against rank 3"),
    (3, {"zero": 1, "shard_group": 1}, (HEAD, "exp_avg"), 1, "exp_avg of {} on rank 1, where ranks 0, 2 agree"),
    (4, {"zero": 1, **PIPELINE}, (UP, "weights"), 1, "parameter {}, rank 0 against rank 1"),
    (4, {"zero": 0, **PIPELINE}, ("blocks.4.up.weight", "exp_avg"), 2, "exp_avg of {}, rank 2 against rank 3"),
    (4, {"zero": 0, **PIPELINE, "pipeline_parallel.schedule": "2bw"}, ("blocks.4.up.weight", "weights"), 3,
     "parameter {}, rank 2 against rank 3"),
    (4, {"zero": 0, "tensor_parallel": 4}, (KEY, "weights"), 1, "parameter {}[0:2,0:8], rank 0 against rank 1"),
    (4, {"zero": 1, "tensor_parallel": 4, **HALF}, (KEY, "exp_avg"), 2,
     "exp_avg of {}[2:4,0:8], rank 2 against rank 3"),
    (4, {"zero": 0, "tensor_parallel": 4, **HALF}, (KEY, "masters"), 0,
     "master weights of {}[0:2,0:8], rank 0 against rank 1"),
    (4, {"zero": 0, "tensor_parallel": 2}, ("blocks.0.norm.weight", "weights"), 3,
     "parameter {}, rank 1 against rank 3"),
    (4, {"zero": 0, "tensor_parallel": 2}, (UP, "weights"), 3, "parameter {}, rank 1 against rank 3"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "plan", "where", "rank", "expected"), CASES)
def test_one_bit_is_found_and_named_on_all_ranks(
    pool: Pool, ranks: int, plan: dict[str, Any], where: tuple[str, str], rank: int, expected: str
) -> None:
    answers = pool.run(flip, ranks, plan, where, rank, 1234 + 7 * rank)
    for found, afterwards in answers:
        assert found.startswith(f"Replicas are not the same any more: {expected.replace('{}', where[0])}. ")
        assert found == answers[0][0]
        assert afterwards == ""


@pytest.mark.parametrize("plan", [{"zero": 3, **NETWORK}, {"zero": 1, "transport": "shared"}])
def test_what_is_there_once_is_not_compared(pool: Pool, plan: dict[str, Any]) -> None:
    assert pool.run(flip, 2, plan, ("head.weight", "weights"), 1, 1234) == [("", "")] * 2


def many(mesh: zs.Mesh) -> str:
    engine = make(mesh, {"zero": 0})
    for parameter in engine.model.parameters():
        parameter.data.add_(1 + mesh.rank)
    with pytest.raises(DivergenceError) as caught:
        engine.check_replicas()
    return str(caught.value)


def test_a_long_list_is_cut(pool: Pool) -> None:
    count = len(list(build("Frozen").parameters()))
    for message in pool.run(many, 3):
        assert message.count("rank 0 against rank 1 against rank 2") == 5
        assert f" and {count - 5} more. " in message


def test_a_rank_alone_has_nothing_to_compare() -> None:
    engine = make(zs.Mesh(), {"zero": 2})
    step(engine, 0)
    engine.check_replicas()


def test_large_flats_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(1000, dtype=torch.float32)
    whole = flat.digest_of([values])
    monkeypatch.setattr(flat, "CHUNK", 24)
    assert flat.digest_of([values]) == flat.digest_of([values[:7], values[7:]]) == whole
    assert flat.digest_of([values.flip(0)]) != whole
