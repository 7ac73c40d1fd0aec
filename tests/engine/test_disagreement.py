"""Ranks that do different things: both stop with both names, instead of hanging or mixing what is not alike."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.plain import MAKERS, branches, data, transport_of
from pool import TIMEOUT, Pool, impatient

import zeroshard as zs
from zeroshard.comm.mesh import mesh_of

# What each of two ranks does, after one step in common with the route "a". F, E: forward with and without gradients,
# of the route that follows; B: backward of the oldest forward; L: the same under no_sync; S: step; C, D:
# clip_grad_norm to 1 and to 2.
CASES: dict[str, tuple[tuple[int, ...], str, str, tuple[str, ...]]] = {
    "extra-forward": ((3,), "Fa B S", "Fa Fa B S", ("forward", "backward")),
    "extra-evaluation": ((3,), "Fa B S", "Ea Fa B S", ("forward", "evaluation")),
    "extra-backward": ((0, 1), "Fa B S", "Fa B Fa B S", ("agreement on step 1", "reduce gradients of")),
    "extra-backward-sliced": ((3,), "Fa B S", "Fa B Fa B S", ("agreement on step 1", "begin of a pass")),
    "extra-step": ((0, 1), "Fa B S", "S Fa B S", ("agreement on step 1", "reduce gradients of")),
    "extra-step-sliced": ((3,), "Fa B S", "S Fa B S", ("agreement on step 1", "begin of a pass")),
    "step-twice": ((0, 1), "Fa B S Fa B S", "Fa B S S Fa B S", ("agreement on step 2", "reduce gradients of")),
    "step-twice-sliced": ((3,), "Fa B S Fa B S", "Fa B S S Fa B S", ("agreement on step 2", "begin of a pass")),
    "local-on-one-rank": ((0, 1), "Fa L S", "Fa B S", ("agreement on step 1", "reduce gradients of")),
    "clip-on-one-rank-only": ((0, 1), "Fa B S", "Fa B C Fa B S", ("agreement on step 1", "clip_grad_norm(1, 2)")),
    "clip-to-other-norms": ((3,), "Fa B C S", "Fa B D S", ("clip_grad_norm(1, 2)", "clip_grad_norm(2, 2)")),
}


@impatient()
def play(mesh: zs.Mesh, zero: int, parts: tuple[str, str]) -> tuple[str, str] | None:
    """On a mesh of two of the four ranks, whose groups are this test's own, since they end half way."""
    both = mesh_of([0, 1], torch.device("cpu"), TIMEOUT)
    if mesh.rank > 1:
        return None
    assert both.store is not None
    store = dist.PrefixStore(f"disagreement/{zero}/{parts}", both.store)
    both = replace(both, store=store, failures=store)
    engine = zs.Engine(
        branches(torch.float32), MAKERS["adamw"], zs.Plan(zero=zero, transport=transport_of(zero)), mesh=both
    )
    losses: list[Any] = []
    try:
        for word in f"Fa B S {parts[both.rank]}".split():
            match word[0]:
                case "F":
                    losses.append(engine(data(0, both.rank, 0, torch.float32), word[1:]))
                case "E":
                    with torch.no_grad():
                        engine(data(0, both.rank, 0, torch.float32), word[1:])
                case "B":
                    engine.backward(losses.pop(0))
                case "L":
                    with engine.no_sync():
                        engine.backward(losses.pop(0))
                case "S":
                    engine.step()
                case "C" | "D":
                    engine.clip_grad_norm(1.0 if word == "C" else 2.0)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize("name", CASES)
def test_disagreement_is_an_error_with_both_names(pool: Pool, name: str) -> None:
    stages, one, other, names = CASES[name]
    runs = [(zero, (one, other) if zero != 1 else (other, one)) for zero in stages]
    runs += [(3, (other, one))] if 3 in stages else []
    for zero, parts in runs:
        found = pool.run(play, 4, zero, parts)[:2]
        assert [kind for kind, _ in found] == ["CommError", "CommError"], found
        for _, message in found:
            assert all(word in message for word in names), message


def test_clip_grad_norm_is_agreed_on_like_a_step(pool: Pool) -> None:
    """Both ranks clip: the same actions in the same order are no disagreement."""
    for zero in (0, 3):
        assert pool.run(play, 4, zero, ("Fa B C S Fa B S", "Fa B C S Fa B S"))[:2] == [("no error", "")] * 2
