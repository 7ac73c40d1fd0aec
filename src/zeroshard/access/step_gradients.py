"""The step's gradients in the user's hands: whole and one by one, read and written, and their norms.

[Note: gradients of a step] Between the backward and the step each rank has a slice of the sum of gradients, scaled by
the loss scale and by the counts of losses. A read reduces the gradients that are left, agrees with all ranks as
`clip_grad_norm` does, and puts the slices of one parameter together, with the factor that the update would have: the
tensor is the `.grad` of a plain loop over the whole batch. A write takes the factor off and goes into the slices; the
norm is measured again then. All calls are collective, so every rank writes alike, as inside of `engine.gathered()`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroshard.access.whole_weights import WholeWeights
from zeroshard.checkpoint.boxes import Box, BoxValues
from zeroshard.comm.collectives import Comm
from zeroshard.errors import PlanError
from zeroshard.parts.gradients import edit_sum
from zeroshard.parts.part import Part
from zeroshard.step.decision import Agreed
from zeroshard.step.sequence import StepSequence
from zeroshard.units import wide_norm
from zeroshard.units.flat import digest_of

KINDS = ("parameter", "group", "module")


class WholeGradients(WholeWeights):
    """Assembles the gradients of all ranks into whole tensors, in the dtype of the weights that updates change."""

    @property
    def world(self) -> Comm:
        """All ranks."""
        return self._world

    @property
    def stale(self) -> bool:
        """Whether other parts took the place of some since the table was made, as unfrozen parameters get."""
        return {id(part) for part, _ in self._entries.values()} != {id(part) for part in self._parts.all}

    @property
    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The model's parameters on this rank."""
        return self._model.named_parameters()

    @property
    def names(self) -> list[str]:
        """The first names of all parameters and buffers, in the order of the model's state dict."""
        return list(self._by_name)

    def whole(self, name: str) -> Tensor:
        """The sum of a parameter's gradients, scaled as it is kept; a collective call."""
        held = self._by_name[name]
        return self._assembled(held, held.kept)

    def put(self, name: str, values: Tensor) -> None:
        """Write a whole gradient, scaled as it is kept, into this rank's slice."""
        part, number = self._entries.get(name, (None, 0))
        if part is None or part.gradients is None:
            return
        whole = Box.whole(tuple(values.shape))

        def write(total: Tensor) -> None:
            for each, _ in _boxes(part, number, total):
                each.values.copy_(values[each.box.slices(whole)])

        edit_sum(part.gradients, write)

    def counted(self, kind: float) -> Iterator[tuple[str, float]]:
        """Norms of order `kind` of the elements that this rank counts, by parameter."""
        for name in self._entries:
            norms = [float(wide_norm(each.values, kind)) for each in self._own_values(name, torch.float32)]
            if norms:
                yield name, _joined(norms, kind)

    @property
    def written(self) -> list[str]:
        """The parameters of this rank with a gradient in this step."""
        every = ((part, part.gradients, number, name) for name, (part, number) in self._entries.items())
        return [name for _, g, number, name in every if g is not None and g.written_in_step[number]]

    def _own_values(self, name: str, dtype: torch.dtype) -> Iterator[BoxValues]:
        """This rank's boxes of a gradient, as far as it counts them."""
        part, number = self._entries.get(name, (None, 0))
        if part is not None and part.gradients is not None and part.place.counted:
            total = part.gradients.settle().settle()
            yield from (each for each, counted in _boxes(part, number, total) if counted)


class Groups(Protocol):
    """An optimizer as the user sees it: its groups hold the model's parameters."""

    param_groups: list[dict[str, Any]]


class StepGradients:
    """Reads and writes the gradients of one engine's step ([Note: gradients of a step]).

    Args:
        wholes: makes the table of whole tensors; a collective call.
        steps: the number of steps taken.
        cut: whether backwards run only inside of `train_step`, as they do in a pipeline.
        agree: whether all ranks decide on each step in one agreement.
    """

    def __init__(
        self,
        sequence: StepSequence,
        wholes: Callable[[], WholeGradients],
        optimizer: Groups,
        steps: Callable[[], int],
        cut: bool,
        agree: bool,
    ) -> None:
        self._sequence, self._make, self._optimizer, self._steps = sequence, wholes, optimizer, steps
        self._cut, self._agree = cut, agree
        self._made: WholeGradients | None = None
        self._inside: Agreed | None = None  # in the function given to `before_update`

    @property
    def _wholes(self) -> WholeGradients:
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def _world(self) -> Comm:
        return self._wholes.world

    def forget(self) -> None:
        """Forget the table of whole tensors, since parts were replaced."""
        self._made = None

    def walk(self) -> Iterator[tuple[str, Tensor]]:
        """As `GradientAccess.gradients`."""
        factor, written = self._begin("gradients")
        moment = self._moment
        for name in (name for name in self._wholes.names if name in written):
            self._check(moment)
            gradient = self._wholes.whole(name).mul_(factor)
            before = gradient._version
            try:
                yield name, gradient
            except GeneratorExit:  # the loop is left here, on all ranks
                changed = gradient._version != before
                if changed and self._moment == moment:
                    self._put(name, gradient, factor, f"{name}: {digest_of([gradient.reshape(-1)])}")
                raise
            self._check(moment)
            changed = gradient._version != before
            if self._same(name, gradient if changed else None):
                self._put(name, gradient, factor)
            del gradient  # before the next is made

    def one(self, name: str) -> Tensor | None:
        """As `GradientAccess.gradient`."""
        factor, written = self._begin("gradient")
        first = self._first(name)
        self._same(first, None)
        return self._wholes.whole(first).mul_(factor) if first in written else None

    def write(self, name: str, values: Tensor | None, writer: int | None) -> None:
        """As `GradientAccess.set_gradient`."""
        factor, written = self._begin("set_gradient")
        first, rank = self._first(name), self._world.mesh.rank
        gradient = self._wholes.whole(first) if first in written else None
        given = values if writer in (None, rank) else gradient
        problem = None
        if gradient is None:
            problem = (
                "got no gradient in this step, and the update leaves it as it is. Add a term to the loss that "
                "depends on it"
            )
        elif not isinstance(given, Tensor) or given.shape != gradient.shape:
            found = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            problem = f"has shape {list(gradient.shape)}, and was given {found}. Give the whole gradient"
        elif not factor or not math.isfinite(factor):
            problem = f"was scaled by {factor}, which no value can undo. Write before clip_grad_norm"
        elif writer is not None and not 0 <= writer < self._world.mesh.ranks:
            problem = f"has writer={writer}, and the ranks are 0 to {self._world.mesh.ranks - 1}"
        problems = self._world.agree_on(problem, f"a gradient to write: {name}")
        problem = next(filter(None, problems), None)
        if problem is not None:
            raise PlanError(f"engine.set_gradient('{name}', ...): '{first}' {problem}.")
        assert isinstance(given, Tensor) and gradient is not None
        gradient.copy_(given.detach())
        if writer is not None:
            self._world.broadcast(gradient, f"gradient {first}", writer)
        else:
            self._same(first, gradient)
        self._put(first, gradient, factor)

    def norms(self, by: str, kind: float) -> dict[Any, float]:
        """As `GradientAccess.grad_norms`."""
        if by not in KINDS:
            raise PlanError(f"grad_norms(by={by!r}): it is one of {', '.join(map(repr, KINDS))}.")
        if not kind > 0:
            raise PlanError(f"norm_type is {kind!r}; it must be above 0, or infinity.")
        factor, written = self._begin("grad_norms")
        numbers = {id(p): number for number, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        groups = {name: numbers.get(id(p)) for name, p in self._wholes.parameters}
        mine = [[name, groups.get(name), norm] for name, norm in self._wholes.counted(kind) if name in written]
        everyone = self._world.agree_on(mine, f"norms by {by}")
        found: dict[Any, list[float]] = {}
        for name, group, norm in sorted((row for rows in everyone for row in rows), key=self._place):
            for key in _keys(by, name, group):
                found.setdefault(key, []).append(norm)
        return {key: _joined(norms, kind) * factor for key, norms in found.items()}

    def before_update(self, function: Callable[[], None] | None) -> None:
        """As `GradientAccess.before_update`."""
        if function is not None and not self._agree:
            raise PlanError(
                "before_update() needs a step on which all stages decide together, and under this schedule each "
                "stage updates alone. Use schedule='1f1b', or 'interleaved'."
            )
        self._sequence.decision.before_update = None if function is None else partial(self._call, function)

    def _call(self, function: Callable[[], None], agreed: Agreed) -> None:
        self._inside = agreed
        try:
            function()
        finally:
            self._inside = None

    def _begin(self, method: str) -> tuple[float, Collection[str]]:
        """Agree on the gradients; returns their factor, and the parameters that have one; a collective call."""
        if self._cut and self._inside is None:
            raise PlanError(
                f"engine.{method}() is for the time between backward and step, and of a model in stages "
                f"engine.train_step() runs both. Call it in a function given to engine.before_update(function)."
            )
        sequence = self._sequence
        agreed = self._inside or sequence.agree(self._steps(), f"{method}()")
        clip = sequence.decision.clip.of(sequence.backward.count)
        if any(self._world.agree_on(self._wholes.stale, "new parts")):
            self._made = None
        everyone = self._world.agree_on(self._wholes.written, "parameters with gradients")
        written = {name for names in everyone for name in names}
        return agreed.gain / sequence.decision.scale * clip, written

    def _put(self, name: str, gradient: Tensor, factor: float, uncompared: str = "") -> None:
        """Write a gradient; the next agreement compares the text of one that was not compared."""
        self._wholes.put(name, gradient / (factor or 1.0))  # 0 without any token: the update multiplies by it again
        self._sequence.note_edit(uncompared)

    def _same(self, name: str, written: Tensor | None) -> bool:
        """Whether all ranks wrote the same into a gradient; False if none did; a collective call.

        Raises:
            PlanError: they wrote different values, or are at different gradients.
        """
        mine = [name, None if written is None else digest_of([written.reshape(-1)])]
        everyone = self._world.agree_on(mine, "gradients, one at a time")
        for rank, (other, digest) in enumerate(everyone):
            if other != name:
                raise PlanError(
                    f"Rank {self._world.mesh.rank} is at the gradient of '{name}' and rank {rank} at that of "
                    f"'{other}'. All ranks take the same gradients in the same order."
                )
            if digest != everyone[0][1]:
                raise PlanError(
                    f"Ranks 0 and {rank} wrote different values into the gradient of '{name}'. Write alike on every "
                    f"rank, or let one write: engine.set_gradient('{name}', values, writer=0)."
                )
        return written is not None

    @property
    def _moment(self) -> tuple[int, int]:
        """Steps, and backwards since the last."""
        return self._steps(), self._sequence.backward.count

    def _check(self, moment: tuple[int, int]) -> None:
        """Refuse to go on in a loop that began at another moment.

        Raises:
            PlanError: with both.
        """
        if self._moment != moment:
            raise PlanError(
                f"A loop over engine.gradients() began in step {moment[0]} after {moment[1]} backwards, and now it is "
                f"step {self._moment[0]} after {self._moment[1]}. Take all gradients between the last backward and the "
                f"step."
            )

    def _first(self, name: str) -> str:
        """The first name of a parameter.

        Raises:
            PlanError: the model has no such parameter.
        """
        first = self._wholes.tied.get(name, name)
        if first not in self._wholes.names:
            near = get_close_matches(name, self._wholes.names, 1)
            hint = f", such as '{near[0]}'" if near else ""
            raise PlanError(f"The model has no parameter '{name}'. Give a name of model.named_parameters(){hint}.")
        return first

    def _place(self, row: Sequence[Any]) -> int:
        return self._order[row[0]]

    @property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._wholes.names)}


class GradientAccess:
    """The methods of an engine for the gradients between backward and step ([Note: gradients of a step])."""

    _step_gradients: StepGradients

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The step's whole gradients one at a time on every rank: (name, tensor), between backward and step.

        The call and each step of the loop are collective. A tensor is the `.grad` of a plain loop over the batches of
        all ranks, after earlier clipping: the loss scale and counts are divided out. It is a copy in the dtype of the
        values that the update changes (fp32 where there are master weights), and memory is that of one. Parameters
        without a gradient are left out, tied ones come once, in the order of the model's state dict.

        Writes into it in place are kept: all ranks write the same. To leave the loop early, all ranks leave it at the
        same tensor. In a pipeline, which runs backward and step together, call it in `before_update`.

        Raises:
            PlanError: ranks wrote different values; or the call is at no such time.
        """
        return self._step_gradients.walk()

    def gradient(self, name: str) -> Tensor | None:
        """The whole gradient of one parameter, a copy as `gradients` gives it; a collective call.

        Returns:
            None for a parameter without a gradient in this step, as `p.grad` in a plain loop.

        Raises:
            PlanError: the model has no such parameter; or the call is at no such time.
        """
        return self._step_gradients.one(name)

    def set_gradient(self, name: str, values: Tensor | None, writer: int | None = None) -> None:
        """Replace the whole gradient of a parameter that has one in this step; a collective call.

        Args:
            values: in the shape of the whole parameter, equal on all ranks.
            writer: the rank whose values all take; the others may pass None.

        Raises:
            PlanError: ranks wrote different values, or no gradient of this shape is there.
        """
        self._step_gradients.write(name, values, writer)

    def grad_norms(self, by: str = "parameter", norm_type: float = 2.0) -> dict[Any, float]:
        """The norms of the step's gradients over all ranks, without whole tensors; a collective call.

        Args:
            by: "parameter", by name; "group", by the number of the optimizer's group; or "module", by the path of each
                module with trained parameters in it or below it, "" for the whole model.
            norm_type: p of the p-norm, above 0; infinity for the largest magnitude.

        Raises:
            PlanError: an argument is something else; or the call is between no backward and its step.
        """
        return self._step_gradients.norms(by, norm_type)

    def before_update(self, function: Callable[[], None] | None) -> None:
        """Call `function` in each step from now on, on every rank, once all gradients are reduced; None ends it.

        In it `gradients`, `gradient`, `set_gradient` and `grad_norms` work under every plan, pipelines too. The norm
        of the step, clipping by the plan and the check for values that are not finite come after it.

        Raises:
            PlanError: stages update without each other.
        """
        self._step_gradients.before_update(function)


def _boxes(part: Part, number: int, total: Tensor) -> Iterable[tuple[BoxValues, bool]]:
    """The boxes of one parameter in this rank's slice of a sum, with views of their values."""
    start, entry = part.flat.index.interval(part.weights.rank)[0], part.flat.index.entries[number]
    low, high = max(start, entry.offset), min(start + total.numel(), entry.stop)
    return part.boxes(number, low, total.detach()[low - start : high - start]) if low < high else ()


def _joined(norms: Sequence[float], kind: float) -> float:
    """The norm of all elements from norms of parts of them."""
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), kind))


def _keys(by: str, name: str, group: int | None) -> list[Any]:
    """The keys of a parameter's norm: its name, its group, or the modules around it, outermost first."""
    if by != "module":
        return [name if by == "parameter" else group]
    parts = name.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
