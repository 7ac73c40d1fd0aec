"""The rules that one rank's list keeps by itself, as the verifier applies them."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from zeroshard.errors import PlanError
from zeroshard.schedule import Action, Kind, Layout, Schedule, verify, with_gathers, with_reductions, with_update
from zeroshard.schedule.orders import naive


def parsed(text: str) -> Schedule:
    return [Action.parse(word) for word in text.split()]


def accepted(schedule: Schedule) -> bool:
    try:
        verify([schedule])
    except PlanError:
        return False
    return True


RANKS = [
    ("B0.0@0", "Rank 0, action 0, B0.0@0, has no forward"),
    ("F0.0@0 F0.0@0", "Rank 0, action 1, F0.0@0, repeats a forward"),
    ("F0.0@0 B0.0@0 B0.0@0", "action 2, B0.0@0, repeats a backward"),
    ("F0.0@0 I0.0@0 W0.0@0 W0.0@0", "action 3, W0.0@0, has no I"),
    ("F0.0@0 W0.0@0", "W0.0@0, has no I"),
    ("F0.0@0 I0.0@0 REDUCE0.0@0", "REDUCE0.0@0, has no backward before it"),
    ("F0.0@0 B0.0@1", r"other weights than its forward \(@0\)"),
    ("F0.0@1", r"a version that is not there; there are \[0\]"),
    ("GATHER0@1", r"a version that is not there; there are \[0\]"),
    ("GATHER0@0 GATHER0@0", "action 1, GATHER0@0, gathers weights that are gathered already"),
    ("FREE0@0", "Rank 0, action 0, FREE0@0, frees weights that are not gathered"),
    ("F0.0@0 GATHER0@0 B0.0@0", "action 0, F0.0@0, uses weights that are not gathered"),
    ("GATHER0@0 F0.0@0 B0.0@0 REDUCE0.0@0 UPDATE0@0", "UPDATE0@0, changes weights that are gathered"),
    ("GATHER0@0 F0.0@0 B0.0@0 REDUCE0.0@0 DROP0@0", "DROP0@0, drops weights that are gathered"),
    ("GATHER0@0 F0.0@0 B0.0@0 FREE0@0 REDUCE0.0@0 UPDATE0@0 GATHER0@1", "chunk 0 is still gathered"),
    ("REDUCE0.0@0", "no backward before it"),
    ("F0.0@0 F0.1@0 B0.0@0 REDUCE0.1@0", "REDUCE0.1@0, follows the backward of microbatch 0"),
    ("F0.0@0 B0.0@0 REDUCE0.0@1", r"REDUCE0.0@1, .*another version \(@0\)"),
    ("F0.0@0 F0.1@0 B0.0@0 B0.1@0 REDUCE0.1@0 F0.2@0 B0.2@0 REDUCE0.2@0", "not reduced one by one"),
    ("F0.0@0 B0.0@0 UPDATE0@0", "action 2, UPDATE0@0, .*reduced"),
    ("UPDATE0@0", "UPDATE0@0, comes before the gradients are reduced"),
    ("F0.0@0 B0.0@0 REDUCE0.0@0 UPDATE0@1", "UPDATE0@1, does not start from the latest version, 0"),
    ("F0.0@0 F0.1@0 B0.0@0 REDUCE0.0@0 UPDATE0@0", "without a backward: microbatches 1"),
    ("F0.0@0 F0.1@0 I0.0@0 W0.0@0 REDUCE0.0@0 UPDATE0@0 I0.1@0", "without weight gradients: microbatches 1"),
    ("F0.0@0 B0.0@0 REDUCE0.0@0", "Rank 0: at the end of its list, chunk 0 has not been updated"),
    ("F0.0@0 F0.1@0 B0.0@0 REDUCE0.0@0 UPDATE0@0 B0.1@0", "after its last update"),
    ("F0.0@0 F0.1@0 B0.0@0 REDUCE0.0@0 UPDATE0@0 B0.1@0 REDUCE0.1@0", "after its last update"),
    ("F0.0@0 B0.0@0 REDUCE0.0@0 DROP0@1", r"DROP0@1, drops a version that is not there; there are \[0\]"),
    ("F0.0@0 B0.0@0 DROP0@0", "DROP0@0, drops a version with 1 microbatches"),
    ("F0.0@0 F0.1@0 B0.0@0 REDUCE0.0@0 DROP0@0", "DROP0@0, drops a version with 1 microbatches"),
    ("F0.0@0 B0.0@0 REDUCE0.0@0 DROP0@0 F0.1@0", "F0.1@0, uses a version that is not there"),
    ("F0.0@0 B0.0@0 REDUCE0.0@0 UPDATE0@0 DROP0@1", "DROP0@1, .*without an update that replaces it"),
    ("F0.0@0 F1.0@0 B0.0@0", "B0.0@0, has no input: neither a RECV_B nor chunk 1"),
    ("F1.0@0", "F1.0@0, has no input: neither a RECV_F nor chunk 0"),
    ("F0.0@0 SEND_F0.0@0>0", "a message of a rank to itself"),
    ("F0.0@0 SEND_F0.0@0>1", "names no peer; there are ranks 0 to 0"),
]


@pytest.mark.parametrize("text, complaint", RANKS)
def test_the_complaint_names_the_place_the_action_and_the_rule(text: str, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        verify([parsed(text)])


def test_a_microbatch_needs_a_number() -> None:
    with pytest.raises(PlanError, match="F0@0, names no microbatch"):
        verify([[Action(Kind.FORWARD)]])


def test_two_chunks_are_told_apart() -> None:
    text = "F0.0@0 F1.0@0 B1.0@0 REDUCE1.0@0 B0.0@0 REDUCE0.0@0 UPDATE0@0 UPDATE1@0"
    verify([parsed(text)])
    assert not accepted(parsed(text.replace("REDUCE1.0", "REDUCE0.0")))


LOWERINGS = list(itertools.product(("none", "before", "after"), (True, False)))


def lowered(microbatches: int, gathers: str, each: bool) -> Schedule:
    """A whole step: gathers not at all, or lowered before or after the reductions."""
    schedule = naive(Layout((1,)), 0, microbatches)
    if gathers == "before":
        schedule = with_gathers(schedule)
    schedule = with_reductions(schedule, each)
    if gathers == "after":
        schedule = with_gathers(schedule)
    return with_update(schedule)


@pytest.mark.parametrize("gathers, each", LOWERINGS)
@pytest.mark.parametrize("microbatches", range(1, 17))
def test_every_lowering_is_accepted(microbatches: int, gathers: str, each: bool) -> None:
    schedule = lowered(microbatches, gathers, each)
    verify([schedule])
    assert is_step(schedule, microbatches)
    gathered = 0 if gathers == "none" else 2 * microbatches
    assert Counter(action.kind for action in schedule) == +Counter(
        {
            Kind.FORWARD: microbatches,
            Kind.BACKWARD: microbatches,
            Kind.GATHER: gathered,
            Kind.FREE: gathered,
            Kind.REDUCE: microbatches if each else 1,
            Kind.UPDATE: 1,
        }
    )


def is_step(schedule: Schedule, microbatches: int) -> bool:
    """By the places of the actions, of one chunk: is this a whole step that gives the right gradient?"""
    places: dict[Kind, list[int]] = {kind: [n for n, a in enumerate(schedule) if a.kind is kind] for kind in Kind}
    of = {(a.kind, a.microbatch): n for n, a in enumerate(schedule)}
    everyone = list(range(microbatches))
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        if sorted(schedule[n].microbatch for n in places[kind]) != everyone:
            return False
    if not all(of[Kind.FORWARD, m] < of[Kind.BACKWARD, m] for m in everyone):
        return False
    backwards = [schedule[n].microbatch for n in places[Kind.BACKWARD]]
    if [schedule[n].microbatch for n in places[Kind.REDUCE]] not in (backwards, backwards[-1:]):
        return False
    for n in places[Kind.REDUCE]:  # a reduction comes after its backward and before the next one
        done = [m for m in backwards if of[Kind.BACKWARD, m] < n]
        if done[-1:] != [schedule[n].microbatch]:
            return False
    borders = sorted(places[Kind.GATHER] + places[Kind.FREE])
    if borders[::2] != places[Kind.GATHER] or borders[1::2] != places[Kind.FREE] or len(borders) % 2:
        return False
    computed = places[Kind.FORWARD] + places[Kind.BACKWARD]
    if borders and not all(any(g < n < f for g, f in zip(borders[::2], borders[1::2], strict=True)) for n in computed):
        return False
    return places[Kind.UPDATE] == [len(schedule) - 1]


def mutants(schedule: Schedule) -> Iterator[Schedule]:
    """All lists with one action deleted, one action repeated elsewhere, or two swapped."""
    for n in range(len(schedule)):
        yield schedule[:n] + schedule[n + 1 :]
    for n, place in itertools.product(range(len(schedule)), range(len(schedule) + 1)):
        yield [*schedule[:place], schedule[n], *schedule[place:]]
    for n, other in itertools.combinations(range(len(schedule)), 2):
        swapped = list(schedule)
        swapped[n], swapped[other] = schedule[other], schedule[n]
        yield swapped


@pytest.mark.parametrize("gathers, each", LOWERINGS)
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_exactly_the_broken_mutants_are_refused(microbatches: int, gathers: str, each: bool) -> None:
    wrong = [
        f"{'refused' if is_step(mutant, microbatches) else 'accepted'}: {' '.join(map(str, mutant))}"
        for mutant in mutants(lowered(microbatches, gathers, each))
        if accepted(mutant) != is_step(mutant, microbatches)
    ]
    assert not wrong, f"{len(wrong)} wrong verdicts, such as\n" + "\n".join(wrong[:5])
