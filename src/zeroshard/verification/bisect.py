"""The search for the first difference: forward, loss, gradients, norm, update, in the order of a step."""

from collections.abc import Mapping

from torch import Tensor

from zeroshard.traffic import Purpose
from zeroshard.verification import causes
from zeroshard.verification.causes import Cause
from zeroshard.verification.compare import (
    ErrorTable,
    SeenCalls,
    Side,
    compare_copies,
    compare_forward,
    compare_gradients,
    compare_losses,
    compare_updates,
    gradient_of,
    nth,
    relative,
)
from zeroshard.verification.job import name_parts
from zeroshard.verification.plain import Plain, PlainStep
from zeroshard.verification.result import FirstDifference
from zeroshard.verification.sketch import distance, ratio, sketch
from zeroshard.verification.watch import ModuleCall, Place
from zeroshard.verification.whole_batch import of_whole_batch

WEIGHTS = dict[str, Tensor]


class Bisection:
    """Compares step by step until the first difference.

    Attributes:
        table: what was compared.
    """

    def __init__(self, side: Side, plain: Plain) -> None:
        coarse = dict.fromkeys(("gradients", "gradient norm"), side.job.gradient_tolerance)
        self.side, self.plain, self.table = side, plain, ErrorTable(side.job.tolerance, coarse)
        self._history: list[tuple[int, WEIGHTS]] = []
        self._label = {share.name: share.flat for step in side.records[:1] for _, share in side.shares(0)}

    def run(self) -> FirstDifference | None:
        """The first difference of all steps."""
        found = self._start()
        for step in range(self.side.job.steps):
            found = found or self._step(step)
        return found

    def _start(self) -> FirstDifference | None:
        """Compare the initial weights of every rank, which are rank 0's."""
        state, wanted = self.side.weights(-1), self.plain.weights()
        for name, values in wanted.items():
            error = relative(state[name].view(values.shape), values)
            if not self.table.enter("initial weights", name, error):
                return self._weight(-1, "initial weights", name, error, self._of_weight(-1, name, wanted))
        self._history.append((-1, wanted))
        return self._copies(-1)

    def whole_batches(self, plain: Plain) -> tuple[FirstDifference | None, str]:
        """The first step with another loss of its whole batch than of its parts; a remark on rows that act on others.

        Args:
            plain: with the initial weights.
        """
        note = ""
        for step in range(self.side.job.steps if self.side.job.parts > 1 else 0):
            whole = of_whole_batch(plain, step)
            if whole is None or (not whole.equal and whole.weights is None):
                note = note or ("" if whole is None else whole.note)
                continue
            self.table.others["whole batch"] = whole.tolerance
            if not self.table.enter("whole batch", f"step {step}", whole.error):
                where = "gradient of the mean over parts"
                return FirstDifference(step, "whole batch", self._loss_name, where, whole.error, whole.cause), note
        return None, note

    def _step(self, step: int) -> FirstDifference | None:
        side, plain = self.side, self.plain
        wanted, before = plain.step(step), plain.weights()
        found = self._forward(step, wanted) or self._loss(step, wanted) or self._gradient(step, wanted)
        found = found or self._norm(step, wanted)
        if found is not None:
            return found
        gradients = side.gradients(step, plain.trained)
        reached = {name: None if wanted.gradients[name] is None else g for name, g in gradients.items()}
        if not side.records[0].steps[step].skipped:
            plain.update(reached)
        updates, buffers = compare_updates(self.table, side, plain, before, step)
        self._history.append((step, plain.weights()))
        if updates:
            return self._update(step, updates)
        if buffers:
            name = next(iter(buffers))
            return self._difference(step, "buffer", name, buffers[name], Cause("it is updated in the forward alone"))
        return self._copies(step)

    def _forward(self, step: int, wanted: PlainStep) -> FirstDifference | None:
        found = compare_forward(self.table, self.side, wanted, step)
        if not found:
            return None
        seen = self.side.calls(step)
        part, place, error = found[0]
        mine = seen[part][place]
        theirs = wanted.calls[part][place]
        path = place[0]
        where = f"output {'' if not place[1] else f'of call {place[1] + 1} '}for {name_parts([part], self._m)}"
        cause = self._of_weights_seen(path, mine, theirs) or self._of_inputs(seen[part], part, place, wanted)
        cause = cause or self._of_bias(path, mine, theirs) or Cause("its inputs and weights agree, its output differs")
        others = len({other[1] for other in found}) - 1
        return FirstDifference(
            step, "forward", cause.module or self._shown(path), where, error, cause.text, cause.collective, others
        )

    def _of_weights_seen(self, path: str, mine: SeenCalls, theirs: ModuleCall) -> Cause | None:
        """The cause if a module's own weights were not those of the step when it was entered."""
        for attribute, wanted in theirs.weights.items():
            if mine.error(lambda call, name=attribute: call.weights.get(name), wanted) <= self.table.tolerance:  # type: ignore[misc]
                continue
            name = f"{path}.{attribute}" if path else attribute
            earlier = [(step, sketch(weights[name])) for step, weights in self._history[:-1] if name in weights]
            found = mine.calls[0].weights.get(attribute, theirs.weights[attribute])
            stale = causes.same_as_before(found, earlier, self.table.tolerance)
            text = f"its {attribute} is not that of the step"
            if stale is not None:
                text = f"its {attribute} is stale: that of {'the start' if stale < 0 else f'step {stale}'}"
            return Cause(text, self._weight_collective(name))
        return None

    def _of_inputs(self, seen: Mapping[Place, SeenCalls], part: int, place: Place, wanted: PlainStep) -> Cause | None:
        """The cause if a module's inputs differ, though the outputs of all modules before it agree."""
        theirs, mine = wanted.calls[part][place], seen[place]
        errors = (mine.error(nth("inputs", n), each) for n, each in enumerate(theirs.inputs))
        if not any(error > self.table.tolerance for error in errors):
            return None
        inside = f"{place[0]}." if place[0] else ""
        earlier = [
            other
            for other, call in wanted.calls[part].items()
            if call.ended < theirs.ended and other in seen and not other[0].startswith(inside)
        ]
        senders = [p for p in earlier if seen[p].rank != mine.rank]
        if senders and seen[earlier[-1]].rank != mine.rank:
            before = self._shown(senders[-1][0])
            return Cause(f"its input is not what {before} returned", f"{Purpose.SEND_ACTIVATIONS} after {before}")
        before = self._shown(earlier[-1][0]) if earlier else "the batch"
        return Cause(f"its input differs, in code between it and {before}")

    def _of_bias(self, path: str, mine: SeenCalls, theirs: ModuleCall) -> Cause | None:
        """The cause if a module's output lacks its bias, or has it once for each rank with a shard of its weight."""
        bias = self.plain.model.get_submodule(path)._parameters.get("bias")
        outputs = mine.calls[0].outputs
        if bias is None or bias.dim() != 1 or not outputs or outputs[0][0] % bias.numel():
            return None
        rows, whole = int(outputs[0][0]) // bias.numel(), theirs.outputs[0]
        added = sketch(bias.detach().expand(rows, -1))
        for times, text in ((0, "its bias is not added"), (self.side.job.together, "each rank adds its bias")):
            changed = (*whole[:2], *(a + (times - 1) * b for a, b in zip(whole[2:], added[2:], strict=True)))
            if distance(outputs[0], changed) <= 8 * self.table.tolerance:
                return Cause(text)
        return None

    def _loss(self, step: int, wanted: PlainStep) -> FirstDifference | None:
        parts, whole = compare_losses(self.table, self.side, wanted, step)
        if parts:
            part, error = parts[0]
            text = "all modules return the same, and the loss made of their output differs"
            where = f"of {name_parts([part], self._m)}"
            return FirstDifference(step, "loss", self._loss_name, where, error, text, None, len(parts) - 1)
        if not whole:
            return None
        found, text = self.side.loss(step), "the losses of all parts agree, and their mean differs"
        counts = [count for _, count in wanted.losses]
        each = [loss / max(count, 1.0) for loss, count in wanted.losses]
        if len(set(counts)) > 1 and abs(sum(each) / len(each) - found) <= self.table.tolerance * abs(found):
            text = f"each part counts alike, although the parts have {min(counts):g} to {max(counts):g} tokens"
        return FirstDifference(step, "loss", self._loss_name, "mean of the step", whole, text)

    def _gradient(self, step: int, wanted: PlainStep) -> FirstDifference | None:
        errors = compare_gradients(self.table, self.side, wanted, step)
        if not errors:
            return None
        order = self._backward_order(wanted)
        name = min(errors, key=lambda each: order.get(each, len(order)))
        cause = self._of_backward(step, wanted)
        if cause is None or cause.collective != Purpose.SUM_ACTIVATIONS:  # which would split all gradients
            cause = causes.of_gradient(self.side, self.plain, step, name) or cause
        cause = cause or Cause("no sum of contributions explains it")
        return self._difference(step, "gradient", name, errors[name], cause, len(errors) - 1)

    def _of_backward(self, step: int, wanted: PlainStep) -> Cause | None:
        """The first module in the backward with another output gradient, up to one factor per part."""
        seen = self.side.calls(step)
        for part, calls in wanted.calls.items():
            both = [(place, seen[part][place], call) for place, call in calls.items() if place in seen.get(part, {})]
            factors = [
                ratio(mine.calls[0].gradients[k], gradient)
                for _, mine, call in both
                for k, gradient in call.gradients.items()
                if mine.calls[0].gradients.get(k, (0.0,))[0] == gradient[0]
            ]
            known = sorted(f for f in factors if f == f)
            factor = known[len(known) // 2] if known else 1.0
            for place, mine, call in sorted(both, key=lambda item: -item[2].ended):
                for k, gradient in call.gradients.items():
                    if mine.error(gradient_of(k), gradient, factor) > 32 * self.table.tolerance:
                        module = self._shown(place[0])
                        where = f"the gradient of {module}'s output"
                        if mine.sums_to(gradient_of(k), gradient, factor):
                            text = (
                                f"{where} is a part on each rank: its sum over the ranks that split layers is missing"
                            )
                            return Cause(text, Purpose.SUM_ACTIVATIONS, module)
                        return Cause(f"{where} differs in {name_parts([part], self._m)}", None, module)
        return None

    def _backward_order(self, wanted: PlainStep) -> dict[str, int]:
        """The order of the parameters: the last modules of the forward first."""
        ended: dict[str, int] = {}
        for place, call in wanted.calls.get(0, {}).items():
            for attribute in call.weights:
                ended[f"{place[0]}.{attribute}" if place[0] else attribute] = call.ended
        return {name: number for number, name in enumerate(sorted(ended, key=lambda each: -ended[each]))}

    def _norm(self, step: int, wanted: PlainStep) -> FirstDifference | None:
        found = self.side.records[0].steps[step].norm
        for record in self.side.records:
            norm = record.steps[step].norm
            error = abs(norm - wanted.norm) / max(wanted.norm, 1e-30) if wanted.norm else abs(norm)
            if not self.table.enter("gradient norm", f"rank {record.rank}", error):
                cause, name = causes.of_norm(self.side, step, norm)
                module = self._shown(name.rpartition(".")[0])
                shown = f"{found:.6g}, should be {wanted.norm:.6g}"
                return FirstDifference(step, "gradient norm", module, shown, error, cause.text, cause.collective)
        return None

    def _update(self, step: int, errors: Mapping[str, float]) -> FirstDifference:
        name = max(errors, key=errors.__getitem__)
        cause = self._of_weight(step, name, self._history[-1][1])
        return self._weight(step, "update", name, errors[name], cause, len(errors) - 1)

    def _of_weight(self, step: int, name: str, wanted: WEIGHTS) -> Cause:
        """The cause of a weight's difference after a step."""
        state = self.side.weights(step)
        older = [(at, weights[name]) for at, weights in self._history if at < step]
        found = causes.of_flat(self.side, name, state, wanted)
        found = found or causes.of_weight(state[name].view_as(wanted[name]), wanted[name], older, self.side.job)
        return found or Cause("the gradient agrees, and the weight after the step does not")

    def _copies(self, step: int) -> FirstDifference | None:
        found = compare_copies(self.table, self.side, self.plain, step)
        if not found:
            return None
        rank, name, error = found[0]
        earlier = [(at, sketch(weights[name])) for at, weights in self._history[:-1]]
        stale = causes.same_as_before(self.side.sketches(step)[rank][name], earlier, self.table.tolerance)
        text = f"rank {rank} has another value than rank 0"
        if stale is not None:
            text += f", that of {'the start' if stale < 0 else f'step {stale}'}"
        return self._weight(step, "weights after the step", name, error, Cause(text), len(found) - 1)

    def _weight(self, step: int, what: str, name: str, error: float, cause: Cause, others: int = 0) -> FirstDifference:
        return self._difference(step, what, name, error, Cause(cause.text, self._weight_collective(name)), others)

    def _weight_collective(self, name: str) -> str | None:
        model = self.plain.model
        parameter = dict(model.named_parameters(remove_duplicate=False)).get(name)
        first = next((n for n, p in model.named_parameters() if p is parameter), name)
        label = self._label.get(first) or next((s.flat for _, s in self.side.shares(0) if s.name == first), None)
        if label is None:
            return None
        if first != name and causes.used_apart(self.side, first, name):
            return f"{Purpose.LEND_WEIGHTS} of {first}"
        return causes.weight_collective(self.side.job, label)

    def _difference(
        self, step: int, what: str, name: str, error: float, cause: Cause, others: int = 0
    ) -> FirstDifference:
        module = cause.module or self._shown(name.rpartition(".")[0])
        return FirstDifference(step, what, module, name, error, cause.text, cause.collective, others)

    @property
    def _m(self) -> int:
        return self.side.job.plan.microbatches

    def _shown(self, path: str) -> str:
        """A module's name in a report."""
        return path or self._whole

    @property
    def _whole(self) -> str:
        return type(self.plain.model).__name__

    @property
    def _loss_name(self) -> str:
        loss = self.side.job.loss
        return getattr(loss, "__name__", "loss") if loss is not None else f"{self._whole} (its loss)"
