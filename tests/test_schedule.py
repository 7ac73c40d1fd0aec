"""Schedules print and parse, lower to the lists that one step needs, and broken ones are refused."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.errors import PlanError
from zeroshard.schedule import Action, Kind, Schedule, accumulation, verify, with_gathers, with_reductions, with_update

NUMBERS = st.integers(0, 10**6)
ACTIONS = st.builds(Action, st.sampled_from(Kind), NUMBERS, st.none() | NUMBERS, NUMBERS)
LOWERINGS = list(itertools.product(("none", "before", "after"), (True, False)))


def lowered(microbatches: int, gathers: str, each: bool) -> Schedule:
    """A whole step: gathers not at all, or lowered before or after the reductions."""
    schedule = accumulation(microbatches)
    if gathers == "before":
        schedule = with_gathers(schedule)
    schedule = with_reductions(schedule, each)
    if gathers == "after":
        schedule = with_gathers(schedule)
    return with_update(schedule)


def words(schedule: Schedule) -> str:
    return " ".join(map(str, schedule))


@settings(derandomize=True, deadline=None)
@given(ACTIONS)
def test_actions_print_and_parse(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text, action",
    [
        ("F0.2@0", Action(Kind.FORWARD, 0, 2)),
        ("B1.0@3", Action(Kind.BACKWARD, 1, 0, 3)),
        ("GATHER0@0", Action(Kind.GATHER)),
        (" FREE12@4 ", Action(Kind.FREE, 12, None, 4)),
        ("REDUCE0.2@0", Action(Kind.REDUCE, 0, 2)),
        ("UPDATE0@0", Action(Kind.UPDATE)),
    ],
)
def test_the_grammar(text: str, action: Action) -> None:
    assert Action.parse(text) == action and str(action) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "F", "F0", "F@0", "X0.1@0", "f0.1@0", "F0.@0", "F0.1@", "F-1@0", "F0.1@0 B0.1@0", "FORWARD0@0"]
)
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(PlanError, match=r"GATHER.*F0\.2@0"):
        Action.parse(text)


@pytest.mark.parametrize(
    "gathers, each, expected",
    [
        ("none", True, "F0.0@0 B0.0@0 REDUCE0.0@0 F0.1@0 B0.1@0 REDUCE0.1@0 UPDATE0@0"),
        ("none", False, "F0.0@0 B0.0@0 F0.1@0 B0.1@0 REDUCE0.1@0 UPDATE0@0"),
        (
            "after",
            True,
            "GATHER0@0 F0.0@0 FREE0@0 GATHER0@0 B0.0@0 FREE0@0 REDUCE0.0@0 "
            "GATHER0@0 F0.1@0 FREE0@0 GATHER0@0 B0.1@0 FREE0@0 REDUCE0.1@0 UPDATE0@0",
        ),
    ],
)
def test_two_microbatches(gathers: str, each: bool, expected: str) -> None:
    assert words(lowered(2, gathers, each)) == expected


@pytest.mark.parametrize("gathers, each", LOWERINGS)
@pytest.mark.parametrize("microbatches", range(1, 17))
def test_every_lowering_is_accepted(microbatches: int, gathers: str, each: bool) -> None:
    schedule = lowered(microbatches, gathers, each)
    verify(schedule)
    assert is_step(schedule, microbatches)
    count = {kind: sum(action.kind is kind for action in schedule) for kind in Kind}
    gathered = 0 if gathers == "none" else 2 * microbatches
    assert count == {
        Kind.FORWARD: microbatches,
        Kind.BACKWARD: microbatches,
        Kind.GATHER: gathered,
        Kind.FREE: gathered,
        Kind.REDUCE: microbatches if each else 1,
        Kind.UPDATE: 1,
    }


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


def accepted(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("gathers, each", LOWERINGS)
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_exactly_the_broken_mutants_are_refused(microbatches: int, gathers: str, each: bool) -> None:
    wrong = [
        f"{'refused' if is_step(mutant, microbatches) else 'accepted'}: {words(mutant)}"
        for mutant in mutants(lowered(microbatches, gathers, each))
        if accepted(mutant) != is_step(mutant, microbatches)
    ]
    assert not wrong, f"{len(wrong)} wrong verdicts, such as\n" + "\n".join(wrong[:5])


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("B0.0@0", "Action 0, B0.0@0, has no forward"),
        ("F0.0@0 F0.0@0", "Action 1, F0.0@0, repeats"),
        ("F0.0@0 B0.0@1", "other weights than its forward"),
        ("GATHER0@0 GATHER0@0", "Action 1, GATHER0@0, gathers what is gathered"),
        ("FREE0@0", "Action 0, FREE0@0, frees what is not gathered"),
        ("REDUCE0.0@0", "no backward before it"),
        ("F0.0@0 B0.0@0 UPDATE0@0", "Action 2, UPDATE0@0, .*reduced"),
        ("F0.0@0 F0.1@0 B0.0@0 REDUCE0.0@0", r"1.*no backward|without a backward.*1"),
    ],
)
def test_the_complaint_names_the_action_and_the_rule(text: str, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        verify([Action.parse(word) for word in text.split()])


def test_two_chunks_are_told_apart() -> None:
    text = "F0.0@0 F1.0@0 B1.0@0 REDUCE1.0@0 B0.0@0 REDUCE0.0@0 UPDATE0@0 UPDATE1@0"
    verify([Action.parse(word) for word in text.split()])
    with pytest.raises(PlanError):
        verify([Action.parse(word) for word in text.replace("REDUCE1.0", "REDUCE0.0").split()])


def test_updates_name_the_version_that_they_end() -> None:
    schedule = with_update([Action(Kind.FORWARD, 1, 0, 4), Action(Kind.FORWARD, 0, 0, 5)])
    assert words(schedule[2:]) == "UPDATE1@4 UPDATE0@5"
