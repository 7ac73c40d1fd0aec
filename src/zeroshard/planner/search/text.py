"""Texts about plans and predictions, for people."""

import re
from collections.abc import Iterable, Sequence

from zeroshard.memory.ledger import Category
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.result import COPY, FETCHED, Found, Prediction, Refusal
from zeroshard.planning.questions import LeftOut
from zeroshard.text import format_bytes

MODES = {
    "fake": "the engine itself ran a step on tensors without values, and every allocation was counted",
    "shallow-real": "the engine itself ran a step on real tensors with few layers, and the other layers were added",
    "estimate": "model states by the formulas, and the rest by a rehearsal of one rank alone",
}
SWITCHES = {  # of the parts of host memory
    "parameters": "offload=parameters",
    "gradients": "on their way to the update; offload=optimizer",
    "master weights": "offload=optimizer",
    "optimizer states": "offload=optimizer",
    "activations": "offload=activations",
    "buffers": "pages of transfers, and of updates ahead of their verdict with offload.speculate",
    FETCHED: "one part's, as it is written",
    COPY: "none with save(wait=True)",
}
TIME_MODES = {
    "roofline": "each operation and collective by the rates of the device and its links",
    "shallow-real": "few layers were really run on this machine, and the other layers were added",
    "estimate": "computation by a rehearsal of one rank alone, traffic and idle stages by formulas",
}


MUCH = 2.0  # times as many tokens per second
FOUND_BY = {"fake": "engine", "roofline": "rates", "shallow-real": "layers"}  # names of modes in tables


def found_by(mode: str) -> str:
    """The name of a mode for people."""
    return FOUND_BY.get(mode, mode)


def why_first(predictions: Sequence[Prediction]) -> str:
    """Why the first of several plans is first, and which is much faster with other results, a sentence each."""
    first, *others = predictions
    faster = much_faster(predictions)
    if faster is None:
        return _why_first(first, others)
    times = predictions[faster].tokens_per_second / first.tokens_per_second
    also = f"Plan {1 + faster} has {times:,.0f} times as many, with other results by"
    return f"{_why_first(first, others)} {also} {', '.join(changes(predictions[faster]))}."


def much_faster(predictions: Sequence[Prediction]) -> int | None:
    """The place of the fastest plan that changes results, where that is much faster than the first, which does not."""
    other = max(range(len(predictions)), key=lambda place: predictions[place].tokens_per_second, default=0)
    if not other or changes(predictions[0]) or not changes(predictions[other]):
        return None
    much = MUCH * predictions[0].tokens_per_second
    return other if predictions[other].tokens_per_second >= much else None


def _why_first(first: Prediction, others: Sequence[Prediction]) -> str:
    fastest = f"Plan 1 is first because it has the most tokens/s: {first.tokens_per_second:,.0f}"
    if not others:
        return "Plan 1 is the only one that fits."
    second = others[0]
    if changes(second) and not changes(first):
        return "Plan 1 is first because it is the fastest that changes no result."
    more = first.tokens_per_second / second.tokens_per_second - 1 if second.tokens_per_second else 0.0
    if more >= 0.001:
        return f"{fastest}, {more:.1%} more than plan 2."
    less = second.peak_bytes - first.peak_bytes
    if less > 0:
        return f"{fastest}, as many as plan 2, with {format_bytes(less)} less at the peak."
    return f"{fastest}, as many as plan 2."


def looked_at(found: Found) -> str:
    """How many plans a search looked at, and its duration."""
    looked = f"Looked at {found.looked_at} plans in {found.seconds:.0f} s"
    return looked + (f" and left {found.left_out} out, slower by estimates or not needed" if found.left_out else "")


def short(plan: Plan, ranks: int | None = None) -> str:
    """A plan in a few words: its slices or stages, precision and microbatches, and settings other than the default.

    Args:
        ranks: number of ranks, from which replicas of a pipeline follow that the plan does not set.
    """
    descriptions = [choice.describe(ranks) for choice in choices_of(plan)]
    parts = (
        (one.name for one in descriptions),
        (one.sizes for one in descriptions),
        (one.settings for one in descriptions),
    )
    return ", ".join(text for part in parts for texts in part for text in texts)


def named(prediction: Prediction) -> str:
    """A plan in a few words, after the adapters and the optimizer that were not asked for."""
    return ", ".join((*_other_tasks(prediction), short(prediction.plan, prediction.ranks)))


def describe(prediction: Prediction) -> list[str]:
    """A prediction in sentences: the plan, its memory, time and traffic, the methods, and notes."""
    p = prediction
    each = "rank"
    for choice in choices_of(p.plan):
        each = choice.row_owner(each)
    free = 1 - p.peak_bytes / p.capacity_bytes
    room = f"{free:.0%} free" if p.fits else f"too much: {p.margin:.0%} must stay free"
    sentences = [
        f"{named(p)}; {p.ranks} rank{'s' * (p.ranks > 1)}, {p.batch} row{'s' * (p.batch > 1)} per {each} and step.",
        *filter(None, [p.owners]),
        f"Memory: {format_bytes(p.peak_bytes)} of {format_bytes(p.capacity_bytes)} at the peak on rank {p.rank}, "
        f"{room}: {_parts(p.memory.items())}.",
        f"Time: {seconds(p.seconds)} per step, {p.tokens_per_second:,.0f} tokens/s, bound by {p.bound}: "
        + ", ".join(f"{cause} {share:.0%}" for cause, share in shares(p).items() if share >= 0.005)
        + ".",
    ]
    sent = {purpose: nbytes for purpose, nbytes in p.wire_bytes.items() if nbytes}
    if sent:
        sentences.append(f"Wire: {format_bytes(sum(sent.values()))} per step on this rank: {_parts(sent.items())}.")
    if p.communicators:
        taken = f"about {format_bytes(p.communicator_bytes)} of the device beside tensors, by assumption"
        sentences.append(f"NCCL: {p.communicators} communicator{'s' * (p.communicators > 1)} on this rank, {taken}.")
    tiers = (
        (p.host_bytes, f"Host: {format_bytes(p.host_bytes)} on one node: {host_parts(p)}."),
        (p.disk_bytes, f"Disk: {format_bytes(p.disk_bytes)} of each rank."),
    )
    sentences += [sentence for nbytes, sentence in tiers if nbytes]
    if p.loading_bytes:
        held = p.host_capacity_bytes
        room = "" if held is None or p.loading_bytes <= held else f", of {format_bytes(held)}"
        sentences.append(
            f"Weights while loading: {format_bytes(p.loading_bytes)}{room} of host memory on one node before the first "
            f"step, as each rank makes the whole model (none where safetensors files in the model's folder are read)."
        )
    if p.waits_for_checkpoints:
        room = format_bytes(p.host_capacity_bytes or 0)
        sentences.append(
            f"Checkpoints: {room} of host memory have no room for whole copies; training waits while states without a "
            f"copy are written, or for all states with save(wait=True)."
        )
    changed = changes(p)
    if changed:
        sentences.append(f"Other numbers than without: {', '.join(changed)}.")
    sentences += [
        f"How memory was found ({found_by(p.mode)}): {MODES[p.mode]}.",
        f"How time was found ({found_by(p.time_mode)}): {TIME_MODES[p.time_mode]}.",
    ]
    return sentences + list(p.notes)


def lacking(prediction: Prediction) -> tuple[str, str]:
    """Which memory is too small for a plan that does not fit, and the way out, a sentence each."""
    p, need = prediction, prediction.smallest_capacity_bytes
    use = "A checkpoint on its way to the disk needs"
    larger = f"A device with {format_bytes(need)} for tensors would hold it."
    for choice in choices_of(p.plan):
        use, larger = choice.on_host(use), choice.budget(need, larger)
    held, room = format_bytes(p.host_needed_bytes), format_bytes(p.host_capacity_bytes or 0)
    host = f"{use} {held} of each node's host memory, which is {room}: {host_parts(p)}."
    more_host = f"Nodes with {held} of host memory would hold it."
    margin = f", and {p.margin:.0%} of it stay free" if p.peak_bytes <= p.capacity_bytes else ""
    capacity = format_bytes(p.capacity_bytes)
    device = f"The fullest rank needs {format_bytes(p.peak_bytes)} of {capacity} at the peak{margin}."
    return {"host": (host, more_host), "device": (device, larger)}[p.full[0]]


def host_parts(prediction: Prediction) -> str:
    """The bytes of one node's host memory by use, the most first, each with its switch."""
    parts = sorted(prediction.host_parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name} {format_bytes(n)}" + (f" ({SWITCHES[name]})" if name in SWITCHES else "") for name, n in parts if n
    )


def changes(prediction: Prediction) -> tuple[str, ...]:
    """Settings with which training gets other numbers than with as much memory as one likes, in words."""
    return (*_other_tasks(prediction), *(text for choice in choices_of(prediction.plan) for text in choice.changes))


def _other_tasks(prediction: Prediction) -> tuple[str, ...]:
    return tuple(name for name in (prediction.adapters, prediction.optimizer) if name)


def left_out(prediction: Prediction) -> list[LeftOut]:
    """Times outside of the curve of memory over the step."""
    return [left for choice in choices_of(prediction.plan) for left in choice.left_out()]


def _parts(parts: Iterable[tuple[str, int]]) -> str:
    """Sizes by name, the largest first, without those of 0 bytes."""
    return ", ".join(f"{name} {format_bytes(n)}" for name, n in sorted(parts, key=lambda part: -part[1]) if n)


def shares(prediction: Prediction) -> dict[str, float]:
    """Each cause's share of the step, the largest first."""
    whole = prediction.seconds or 1.0
    causes = sorted(prediction.causes.items(), key=lambda cause: -cause[1])
    return {cause: spent / whole for cause, spent in causes}


def categories(predictions: Iterable[Prediction]) -> list[str]:
    """All categories of memory: the ledger's in its order, then others."""
    known = [str(category) for category in Category]
    held = [c for p in predictions for nbytes in (p.memory, *(event.nbytes for event in p.events)) for c in nbytes]
    return [c for c in known if c in held] + [c for c in dict.fromkeys(held) if c not in known]


def seconds(time: float) -> str:
    """Seconds as text: 0.0123 is 12.3 ms."""
    unit, factor = ("s", 1.0) if time >= 1 else ("ms", 1e3) if time >= 1e-3 else ("\N{MICRO SIGN}s", 1e6)
    value = time * factor
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{f'{value:#.3g}'.rstrip('.')} {unit}"


def alike(refused: Sequence[Refusal]) -> list[list[Refusal]]:
    """Refusals in groups with equal reasons and ways out up to numbers, in order of first occurrence."""
    groups: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in refused:
        key = (_without_numbers(refusal.why), _without_numbers(refusal.way_out))
        groups.setdefault(key, []).append(refusal)
    return list(groups.values())


def _without_numbers(sentence: str) -> str:
    return re.sub(r"\d[\d.,]*( ?[KMGT]?i?B\b)?", "#", sentence)
