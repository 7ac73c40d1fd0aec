"""What other engines get wrong: unused parameters, ranks that differ, several backwards, NaN, freed weights, disagreement."""

from typing import Any

import pytest
import torch
from engine.plain import MAKERS, Script, branches, by_engine, by_hand, copy_of, data, mean_gradients, take_step
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs

STAGES = (0, 1, 2, 3)
UNITS: dict[str, tuple[str, ...] | None] = {"blocks": None, "one": (), "whole-list": ("branches",)}

BOTH = {
    # the same on all ranks: used in one step, not in the next
    "unused-later": Script(((("ab",),), (("a",),), (("ab",),), (("b",),), (("",),), (("ba",),))),
    "used-later": Script(((("a",),), (("a",),), (("ab",),), (("b",),), (("abc",),))),
    "twice-in-one": Script(((("aba",),), (("aa",),), (("cbc",),))),
}
APART = {
    # on some ranks only
    "some-ranks": Script(((("ab",), ("ab",)), (("ab",), ("a",)), (("a",), ("ab",)), (("ab",), ("",)), (("ab",), ("ab",)))),
    "equal-shapes": Script(((("a",), ("b",)), (("a",), ("b",)), (("b",), ("a",)), (("a",), ("a",)), (("a",), ("b",)))),
    "other-shapes": Script(((("a",), ("c",)), (("a",), ("c",)), (("c",), ("a",)), (("ac",), ("c",)), (("a",), ("c",)))),
    "one-comes-back": Script(((("abc",), ("abc",)), (("a",), ("a",)), (("ab",), ("a",)), (("a",), ("bc",)), (("a",), ("abc",)))),
    "detour-between": Script(((("a",), ("b",)), (("c",), ("c",)), (("a",), ("b",)), (("b",), ("a",)))),
    "in-a-microbatch": Script(((("a", "b"), ("b", "a")), (("a", "a"), ("b", "")), (("ab", "b"), ("", "a")))),
}
SEVERAL = {
    "two": Script(((("ab", "ab"),), (("a", "b"),), (("ab", "a"),))),
    "two-first": Script(((("ab", "ab"),), (("a", "b"),), (("ab", "a"),)), forwards_first=True),
    "plain": Script(((("ab", "ab"),), (("a", "b"),)), forwards_first=True, plain=True),
    "local-first": Script(((("ab", "ab", "ab"),), (("a", "b", "a"),)), local=(0,)),
    "local-last": Script(((("ab", "ab", "ab"),), (("a", "b", "b"),)), local=(2,)),
    "local-middle": Script(((("ab", "ab", "ab"),), (("a", "b", "ab"),)), local=(1,), forwards_first=True),
    "local-all": Script(((("ab", "ab", "ab"),), (("a", "b", "ab"),)), local=(0, 1, 2)),
    "local-apart": Script(((("a", "b"), ("b", "b")), (("a", "b"), ("a", ""))), local=(0, 1)),
}


def run_scripts(mesh: zs.Mesh, script: Script, zero: int) -> dict[tuple[str, str], Any]:
    """A script under every way of cutting into units, with both optimizers."""
    cases = [("adamw", units) for units in UNITS] + [("momentum", "blocks")]
    return {(maker, cut): by_engine(mesh, script, maker, zs.Plan(zero=zero, units=UNITS[cut])) for maker, cut in cases}


def check_script(pool: Pool, script: Script, zero: int, ranks: int = 2) -> None:
    """Losses and the weights after every step are those of plain PyTorch; what got no gradient has not moved by a bit."""
    answers = pool.run(run_scripts, ranks, script, zero)
    for maker, cut in answers[0]:
        losses, weights = by_hand(script, ranks, maker)
        for rank, answer in enumerate(answers):
            got_losses, got_weights = answer[maker, cut]
            for step, expected in enumerate(weights):
                where = f"{maker}, units {cut}, rank {rank}, step {step}"
                torch.testing.assert_close(got_losses[step], losses[step][rank], rtol=1e-10, atol=0, msg=lambda m: f"{where}: {m}")
                for name, value in expected.items():
                    torch.testing.assert_close(got_weights[step][name], value, rtol=1e-9, atol=1e-12, msg=lambda m: f"{where}, {name}: {m}")
                    if step and torch.equal(value, weights[step - 1][name]):
                        assert torch.equal(got_weights[step][name], got_weights[step - 1][name]), f"{where}: {name} moved"


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("name", BOTH)
def test_parameter_without_gradient_gets_no_update(pool: Pool, name: str, zero: int) -> None:
    """No weight decay, no momentum, no count of steps: as torch treats a parameter whose `.grad` is None."""
    check_script(pool, BOTH[name], zero)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("name", APART)
def test_ranks_that_use_different_parameters(pool: Pool, name: str, zero: int) -> None:
    """All ranks update by the mean over all ranks, zeros where a rank has no gradient."""
    check_script(pool, APART[name], zero)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("name", SEVERAL)
def test_several_backwards_before_a_step_add_up(pool: Pool, name: str, zero: int) -> None:
    check_script(pool, SEVERAL[name], zero)


@pytest.mark.parametrize("zero", [1, 3])
def test_four_ranks_that_differ(pool: Pool, zero: int) -> None:
    script = Script(((("a",), ("b",), ("c",), ("",)), (("b",), ("c",), ("a",), ("abc",)), (("a",), ("a",), ("",), ("b",))))
    check_script(pool, script, zero, ranks=4)
