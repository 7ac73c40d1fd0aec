"""What is wrong with a randomly drawn case that was carried out: nothing, or a list of complaints."""

import functools
import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from engine import models
from engine.random_plans import Case, has_way_out, message_of, plan_of, refusal_of
from engine.random_runs import Log, Plain, comparable, follows_plainly
from pipeline.emulation import Case as Asynchronous
from pipeline.emulation import Emulation
from torch import Tensor

import zeroshard as zs
from zeroshard.recompute.policy import LOSSY

BLOCKS = {"Five": 5, "TiedFive": 5, "Thrifty": 5, "Spiked": 5, "Deep": 12, "DeepTied": 12}  # that can be emulated
NOISY = (
    0.005  # of the elements, those with such tiny gradients that Adam makes rounding visible; wrong versions move all
)


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    Attributes:
        kind: "refused" with the plan, "refused by the engine", "trained" or "failed".
        reason: of a refusal, the fields or the class of the error and the beginning of its message.
        complaints: what is wrong.
        compared: with what the run was compared.
    """

    kind: str
    reason: str = ""
    complaints: list[str] = field(default_factory=list)
    compared: str = ""


def refused(case: Case) -> Verdict | None:
    """The verdict on a plan that cannot be made; None if it can."""
    refusal = refusal_of(case.plan)
    if refusal is None:
        return None
    complaints = [f"{refusal.complaint}: {refusal.message}"] if refusal.complaint else []
    return Verdict("failed" if complaints else "refused", " + ".join(refusal.needed), complaints)


def judge(case: Case, answers: list[dict[str, Any]]) -> Verdict:
    """The verdict on what all ranks saw of a case whose plan can be made."""
    if any("refused" in answer for answer in answers):
        message = answers[0].get("message", "")
        complaints = [] if has_way_out(message) else [f"the engine's refusal does not say the way out: {message}"]
        if len({answer.get("refused") for answer in answers}) > 1:
            complaints.append(f"not all ranks refused alike: {[answer.get('message') for answer in answers]}")
        told = re.sub(r"\d+", "N", re.sub(r"'[^' ]*'", "...", message))  # so that like reasons are counted together
        reason = f"{answers[0].get('refused')}: {told[:70]}"
        return Verdict("failed" if complaints else "refused by the engine", reason, complaints)
    complaints = [f"rank {rank}: {words}" for rank, answer in enumerate(answers) for words in answer["wrong"]]
    complaints += _alike(case, answers)
    if complaints:
        return Verdict("failed", "", complaints)
    emulated = _asynchronous(case, answers)
    if emulated is not None:
        complaints, compared = _against_emulation(emulated, case, answers), "the papers' equations"
    elif comparable(case):
        complaints, compared = _against_plain(case, answers), "a plain loop"
    else:
        complaints, compared = _against_itself(answers), "itself"
    return Verdict("failed" if complaints else "trained", "", complaints, compared)


def _alike(case: Case, answers: list[dict[str, Any]]) -> list[str]:
    """What ranks saw unlike one another; and values that are not finite where no infinity was fed in."""
    logs = [answer["log"] for answer in answers]
    if len({tuple(word for word, _ in log) for log in logs}) > 1:
        return [f"the ranks did not do the same: {[[word for word, _ in log] for log in logs]}"]
    streams = any(plan_of(s, ".").streams for s in (case.plan, case.other) if message_of(s) is None)
    found = []
    for place, (word, value) in enumerate(logs[0]):
        others = [log[place][1] for log in logs[1:]]
        if word.startswith("weights"):
            bad = [k for k, v in value.items() if any(not _same(v, other[k]) for other in others)]
            if bad:
                found.append(f"ranks have unlike {bad[0]} in entry {place}")
            if case.model != "Spiked" and not all(v.isfinite().all() for v in value.values()):
                found.append(f"weights are not finite in entry {place}")
        elif word in ("norm", "skipped", "scale") and not streams and len({repr(v) for v in (value, *others)}) > 1:
            found.append(f"ranks have unlike {word} in entry {place}: {[value, *others]}")
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def _of_lanes(values: list[tuple[int, float | None]]) -> float:
    """The mean over lanes of what their ranks say."""
    by_lane = {data_rank: value for data_rank, value in values if value is not None}
    return sum(by_lane.values()) / len(by_lane)


@functools.cache
def _initial(model: str, meta_seed: int | None) -> dict[str, Tensor]:
    """The weights with which a case begins."""
    if meta_seed is None:
        return {k: v.clone() for k, v in models.build(model).state_dict().items()}
    with torch.device("meta"):
        empty = models.build(model)
    engine = zs.Engine(empty, functools.partial(torch.optim.SGD, lr=0.0), zs.Plan(zero=0, seed=meta_seed))
    return engine.state_dict()


def _against_plain(case: Case, answers: list[dict[str, Any]]) -> list[str]:
    plan = plan_of(case.plan, ".")
    log, start = answers[0]["log"], _initial(case.model, plan.seed if case.meta else None)
    wanted = Plain(case, log, start).play()
    words, others = [word for word, _ in log], [word for word, _ in wanted]
    if words != others:
        said = log[-1][1] if words[-1] == "not finite" else ""
        overflows = said and plan.scales_loss  # of fp16 at the floor of the scale, which a plain loop does not meet
        if not overflows:
            return [f"the run went {words} and a plain loop {others}: {said}"]
    found = list(zip(*(answer["log"] for answer in answers), strict=True))
    complaints = _far(case, found, wanted, [])
    if complaints:  # unless another order of sums makes as much of a difference, as where Adam meets tiny gradients
        roundings = [Plain(case, log, start, parts).play() for parts in (2, 3, 4, 6, 12)]
        complaints = _far(case, found, wanted, roundings)
    return complaints


def _far(case: Case, found: list[Any], wanted: Log, roundings: list[Log]) -> list[str]:
    """Where a run is too far from a plain loop; `roundings` are plain loops that add up in other orders."""
    plan = plan_of(case.plan, ".")
    close = _Close(case, plan, wanted[0][1])
    for place, (entries, (word, value), *others) in enumerate(zip(found, wanted, *roundings, strict=False)):
        if word == "plan" and entries[0][1] == "other":
            plan = plan_of(case.other, ".")
            if not follows_plainly(plan):
                break
            close.enter(plan)
        elif complaint := close.complaint(word, [entry for _, entry in entries], value, [v for _, v in others]):
            return [f"entry {place} of {[w for w, _ in wanted]}: {complaint}"]
        if word == "skipped" and not value and not math.isfinite(wanted[place - 1][1]):
            break  # ignored as the plan says; which elements it spoils depends on the microbatch that it came with
    return []


class _Close:
    """How far a run may be from a plain loop: not at all but for the order of sums, or as its few bits let it.

    Attributes:
        loose: whether something in fewer than 32 bits has come in.
    """

    def __init__(self, case: Case, plan: zs.Plan, start: dict[str, Tensor]) -> None:
        self.case, self.start, self.loose = case, start, case.optimizer == "8 bits"
        self.enter(plan)

    def enter(self, plan: zs.Plan) -> None:
        """Go on under a plan."""
        self.loose |= plan.precision != "fp32" or plan.offloading.moments != "fp32"
        self.loose |= plan.reduce_dtype in ("bf16", "fp16") or bool(set(plan.saving.compress) & set(LOSSY))

    def complaint(self, word: str, found: list[Any], wanted: Any, others: list[Any]) -> str | None:
        """What is wrong with what all ranks found; `others` is what plain loops want that round otherwise."""
        if word.startswith("weights"):
            return self._weights(word, found[0], wanted, others)
        if word in ("loss", "evaluation", "norm"):
            mean = found[0] if word == "norm" else _of_lanes(found)
            rtol = {"loss": 3e-2, "evaluation": 3e-2, "norm": 0.1}[word] if self.loose else 1e-5
            rtol = max(rtol, 1e-4) if word == "norm" else rtol
            return None if _near(mean, wanted, rtol) else f"{word} is {mean} and a plain loop's {wanted}"
        if word == "skipped" and found[0] != wanted:
            return f"skipped is {found[0]} and a plain loop's {wanted}"
        return None

    def _weights(
        self, word: str, found: dict[str, Tensor], wanted: dict[str, Tensor], others: list[dict[str, Tensor]]
    ) -> str | None:
        if found.keys() != wanted.keys():
            return f"{word} have the names {sorted(found.keys() ^ wanted.keys())} too many or too few"
        if word == "weights at the start":
            bad = [name for name, value in found.items() if not torch.equal(value, wanted[name].to(value.dtype))]
            return f"{word} differ in {bad[0]}" if bad else None
        unlike = [name for name, value in wanted.items() if not torch.equal(found[name].isfinite(), value.isfinite())]
        if unlike:
            return f"other elements of {unlike[0]} are finite than in a plain loop"
        apart = {name: value.to(wanted[name].dtype) - wanted[name] for name, value in found.items()}
        if not self.loose:
            for name, value in wanted.items():
                noise = max(((o[name] - value).abs().nan_to_num(0.0).max().item() for o in others), default=0.0)
                if (apart[name].abs() > 1e-5 + 1e-5 * value.abs() + min(3 * noise, 1e-3)).any():
                    most = apart[name].abs().nan_to_num(0.0).max()
                    return f"{name} is off by {most:.3g}, of which {noise:.3g} may be noise"
            return None
        moved = _norm([wanted[name] - self.start[name] for name in found])
        rounding = _norm(list(wanted.values())) * 2**-8
        share = 0.2 if self.case.optimizer in ("sgd", "nesterov", "plain sgd") else 0.5
        distance = _norm(list(apart.values()))
        if distance > share * moved + rounding:
            return f"{word} are {distance:.3g} off, after moving {moved:.3g}"
        return None


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(t.double().nan_to_num(0.0, 0.0, 0.0).square().sum().item() for t in tensors))


def _near(found: float, wanted: float, rtol: float) -> bool:
    return (
        math.isclose(found, wanted, rel_tol=rtol, abs_tol=1e-9)
        or repr(found) == repr(wanted)
        or (not math.isfinite(found) and not math.isfinite(wanted))
    )


def _against_itself(answers: list[dict[str, Any]]) -> list[str]:
    """The second run is the first again, unless the time that layers took cut the model otherwise."""
    for rank, answer in enumerate(answers):
        again = answer["again"]
        if again["splits"] != answer["splits"]:
            continue
        for place, ((word, value), (_, other)) in enumerate(zip(answer["log"], again["log"], strict=True)):
            same = (
                all(_same(v, other[k]) for k, v in value.items())
                if isinstance(value, dict)
                else repr(value) == repr(other)
            )
            if not same:
                return [f"rank {rank}: a second run has another {word} in entry {place}"]
    return []


def _asynchronous(case: Case, answers: list[dict[str, Any]]) -> Asynchronous | None:
    """The case as an emulation of the papers' equations takes it; None where that does not know all that is in it."""
    plan = plan_of(case.plan, ".")
    log: Log = answers[0]["log"]
    known = plan.streams and case.model in BLOCKS and case.optimizer in models.OPTIMIZERS
    plain = not (case.groups or case.scheduled or case.meta) and ("plan", "other") not in log
    exact = plan.precision in ("fp32", "bf16") and not plan.fp32_modules and plan.reduce_dtype in (None, "fp32")
    blocks, firsts = BLOCKS.get(case.model, 0), [0]
    for name in answers[0]["splits"][0]:
        firsts.append(int(name.removeprefix("blocks.")) if name.startswith("blocks.") else blocks)
    exact = exact and not set(plan.saving.compress) & set(LOSSY)
    alike = len(set(answers[0]["splits"])) == 1 and "prefix" not in answers[0]["splits"][0]
    if not (known and plain and exact and alike) or plan.nonfinite == "ignore":
        return None
    letters = {"evaluate": "e", "gathered": "", "write": ""}
    script = "".join("s" + "".join(letters.get(event, "f") for event in step.after) for step in case.steps)
    sizes = tuple(b - a for a, b in zip(firsts, [*firsts[1:], blocks], strict=True))
    more = {"precision": plan.precision, "clip_norm": plan.clip_norm, "nonfinite": plan.nonfinite}
    replicas = plan.pipeline.replicas or (case.ranks // plan.pipeline.stages,) * plan.pipeline.stages
    schedule = "vertical" if plan.pipeline.vertical_sync else plan.pipeline.schedule
    return Asynchronous(
        schedule, sizes, plan.microbatches, case.model, case.optimizer, replicas, script, case.rows, more
    )


def _against_emulation(emulated: Asynchronous, case: Case, answers: list[dict[str, Any]]) -> list[str]:
    emulation = Emulation(emulated)
    evaluations = emulation.play()
    wanted = emulation.weights()
    few, start = emulated.more["precision"] == "bf16", _initial(case.model, None)
    rtol = 1e-2 if few else 1e-5
    for rank, answer in enumerate(answers):
        losses = [value for _, (_, value) in _entries(answer["log"], "loss")]
        expected = [emulation.mean_loss(number, rank) for number in range(len(losses))] if losses[0] is not None else []
        for number, (found, value) in enumerate(zip(losses, expected, strict=False)):
            if not _near(found, value, rtol):
                return [f"rank {rank}: the loss of step {number} is {found} and the equations' {value}"]
        for (_, (data_rank, found)), values in zip(_entries(answer["log"], "evaluation"), evaluations, strict=True):
            if not _near(found, values[data_rank], rtol):
                return [f"rank {rank}: an evaluation is {found} and the equations' {values[data_rank]}"]
        apart = {name: (answer["log"][-1][1][name].float() - value.float()).abs() for name, value in wanted.items()}
        worst = max(apart, key=lambda name: float(apart[name].max()))
        told = f"rank {rank}: {worst} is off by {float(apart[worst].max()):.3g} from the equations"
        if few:  # rounding of the clipped gradients decides bits of 16, and those of later ones
            moved = _norm([value.float() - start[name] for name, value in wanted.items()])
            if _norm(list(apart.values())) > 0.3 * moved + _norm(list(wanted.values())) * 2**-8:
                return [told]
            continue
        far = sum(int((apart[name] > 1e-5 + 1e-5 * value.abs()).sum()) for name, value in wanted.items())
        if far > NOISY * sum(value.numel() for value in wanted.values()) or float(apart[worst].max()) > 1e-3:
            return [told]
    return []


def _entries(log: Log, word: str) -> list[tuple[str, Any]]:
    return [entry for entry in log if entry[0] == word]
