"""What the planner finds, in words: a plan in a few of them, a prediction in a few sentences."""

import re
from collections.abc import Iterable, Sequence

from zeroshard.ledger import Category
from zeroshard.pipeline.cluster import format_size
from zeroshard.plan import Plan
from zeroshard.planner.result import Prediction, Refusal

MODES = {
    "fake": "the engine itself ran a step on tensors without values, and every allocation was counted",
    "shallow-real": "the engine itself ran a step on real tensors with few layers, and the other layers were added",
    "estimate": "model states by the formulas, and the rest by a rehearsal of one rank alone",
}
OFFLOADED = ("optimizer", "parameters", "activations")  # in the order in which it is tried
NO_WAITING = "Memory over the step leaves out the time in which the rank waits for other stages."
TIME_MODES = {
    "roofline": "each operation and collective by the rates of the device and its links",
    "shallow-real": "few layers were really run on this machine, and the other layers were added",
    "estimate": "computation by a rehearsal of one rank alone, traffic and idle stages by formulas",
}


def short(plan: Plan, ranks: int | None = None) -> str:
    """A plan in a few words: what it slices or cuts, its precision, its microbatches, and what is not by default.

    Args:
        ranks: with it, the replicas of a pipeline can be told where the plan leaves them open.
    """
    words = [f"zero {plan.zero}", plan.precision]
    if plan.pipelined:
        words.insert(0, f"{plan.stages} stages {plan.schedule}{_replicas(plan, ranks)}")
    if plan.microbatches > 1:
        words.append(f"{plan.microbatches} microbatches")
    if plan.chunks > 1:
        words.append(f"{plan.chunks} chunks per stage")
    if plan.shard_ranks is not None:
        words.append(f"slices over {plan.shard_ranks} ranks")
    if plan.recompute != "auto":
        words.append("recompute" if plan.recomputes else "no recompute")
    if plan.reduce_dtype is not None:
        words.append(f"gradients sent in {plan.reduce_dtype}")
    if plan.reduce_every != "auto":
        words.append(f"reduced every {plan.reduce_every}")
    if plan.offload:
        share = "" if plan.offload_share == 1 else f" {plan.offload_share:.0%}"
        words.append("offload " + " + ".join(part for part in OFFLOADED if part in plan.offloads) + share)
    return ", ".join(words)


def _replicas(plan: Plan, ranks: int | None) -> str:
    replicas = plan.replicas
    if replicas is None and ranks is not None and ranks % plan.stages == 0:
        replicas = (ranks // plan.stages,) * plan.stages
    if replicas is None or set(replicas) == {1}:
        return ""
    return f" x {replicas[0]}" if len(set(replicas)) == 1 else f" x {'-'.join(map(str, replicas))}"


def describe(prediction: Prediction) -> list[str]:
    """A prediction in sentences: the plan, its memory, its time, what it sends, how that was found, what to know."""
    p = prediction
    each = "lane" if p.plan.pipelined else "rank"
    free = 1 - p.peak_bytes / p.capacity_bytes
    room = f"{free:.0%} free" if p.fits else f"too much: {p.margin:.0%} must stay free"
    sentences = [
        f"{short(p.plan, p.ranks)}; {p.ranks} rank{'s' * (p.ranks > 1)}, {p.batch} row{'s' * (p.batch > 1)} per {each}"
        " and step.",
        f"Memory: {format_size(p.peak_bytes)} of {format_size(p.capacity_bytes)} at the peak on rank {p.rank}, {room}: "
        f"{_parts(p.memory.items())}.",
        f"Time: {seconds(p.seconds)} per step, {p.tokens_per_second:,.0f} tokens/s, bound by {p.bound}: "
        + ", ".join(f"{cause} {share:.0%}" for cause, share in shares(p).items() if share >= 0.005)
        + ".",
    ]
    sent = {purpose: nbytes for purpose, nbytes in p.wire_bytes.items() if nbytes}
    if sent:
        sentences.append(f"Wire: {format_size(sum(sent.values()))} per step on this rank: {_parts(sent.items())}.")
    if p.host_bytes:
        kept = f", of each rank: {_parts(p.host.items())}" if any(p.host.values()) else ""
        sentences.append(f"Host: {format_size(p.host_bytes)} on one node{kept}.")
    if p.disk_bytes:
        sentences.append(f"Disk: {format_size(p.disk_bytes)} of each rank.")
    sentences += [
        f"Memory was found so ({p.mode}): {MODES[p.mode]}.",
        f"Time was found so ({p.time_mode}): {TIME_MODES[p.time_mode]}.",
    ]
    return sentences + list(p.notes)


def _parts(parts: Iterable[tuple[str, int]]) -> str:
    """The largest first; what is nothing is left out."""
    return ", ".join(f"{name} {format_size(n)}" for name, n in sorted(parts, key=lambda part: -part[1]) if n)


def shares(prediction: Prediction) -> dict[str, float]:
    """The share of the step that each cause takes, the largest first."""
    whole = prediction.seconds or 1.0
    causes = sorted(prediction.causes.items(), key=lambda cause: -cause[1])
    return {cause: spent / whole for cause, spent in causes}


def categories(predictions: Iterable[Prediction]) -> list[str]:
    """All categories of memory: the ledger's in its order, then others."""
    known = [str(category) for category in Category]
    held = [c for p in predictions for nbytes in (p.memory, *(event.nbytes for event in p.events)) for c in nbytes]
    return [c for c in known if c in held] + [c for c in dict.fromkeys(held) if c not in known]


def seconds(time: float) -> str:
    """Seconds as people read them: 0.0123 is 12.3 ms."""
    unit, factor = ("s", 1.0) if time >= 1 else ("ms", 1e3) if time >= 1e-3 else ("\N{MICRO SIGN}s", 1e6)
    value = time * factor
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{f'{value:#.3g}'.rstrip('.')} {unit}"


def alike(refused: Sequence[Refusal]) -> list[list[Refusal]]:
    """Refusals in groups whose reasons and ways out differ only in numbers, groups in the order of their first."""
    groups: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in refused:
        key = (_without_numbers(refusal.why), _without_numbers(refusal.way_out))
        groups.setdefault(key, []).append(refusal)
    return list(groups.values())


def _without_numbers(sentence: str) -> str:
    return re.sub(r"\d[\d.,]*( ?[KMGT]?i?B\b)?", "#", sentence)
