"""Hooks along the forward: units are gathered before use and freed after it; the user's classes stay as they are.

[Note: saved weights] Autograd saves weights, or views of them, for the backward. A saved tensor that lives in a
gathered buffer is kept as it is (it pins no memory, the storage is emptied under it) and its unit is gathered again
before the saved tensor is read, whatever path the backward took. A backward that makes a graph (create_graph=True)
outside of a forward runs without these hooks; the weights that its graph saves are copies.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.access.writes import Writes
from zeroshard.autograd.embeddings import make_rows_alone
from zeroshard.engine.build import Assembly
from zeroshard.memory.ledger import Ledger
from zeroshard.parts.part import LateUpdates, Part
from zeroshard.parts.weights import ABSENT, Gatherer, PassKind, Weights
from zeroshard.precision.clash import explain_clash
from zeroshard.saved.kept import CountedTensor, HooksOfForward, Kept, Stored
from zeroshard.step.backward import Backward
from zeroshard.units import values_of
from zeroshard.units.compiling import check_compiler
from zeroshard.units.hooks import (
    Hook,
    absent_in_transform,
    active_compiler,
    explain_transform,
    listen,
    outside,
    outside_transforms,
    place_of,
    runs_saved_hooks,
    tensors_in,
    transforming,
    unwrapped,
    with_tensors,
)
from zeroshard.validation.model_checks import refuse_renormalising
from zeroshard.zero.lone_calls import LoneCalls


class Forward:
    """Installs and holds the forward hooks of one model.

    Attributes:
        writes: watches the parameters.
        lone: calls of modules outside of the model's forward.
        saver: stores tensors that autograd saves.
    """

    def __init__(self, model: nn.Module, assembly: Assembly, backward: Backward, ledger: Ledger) -> None:
        self._parts, self._gatherer, self._late = assembly.parts, assembly.gatherer, assembly.late
        self._precision, self.saver = assembly.precision, assembly.saver
        self._backward, self._ledger = backward, ledger
        self._root = len(self._parts.units) - 1
        self._open: list[_Call] = []
        self._homes: dict[int, tuple[int, Weights]] = {}
        self._find_homes()
        self._known: set[int] = set()  # storages of weights, which are no activations
        self._counts = ledger.limits_activations
        self._visitors: list[int] = []  # units that modules of other units have read in the pass under way
        self.lone = LoneCalls(self, self._gatherer)
        self.writes = Writes(model, assembly.parts, self)
        self.unfreeze: Callable[[], None] = lambda: None  # trains parameters that were frozen and require gradients now
        make_rows_alone(model)
        model.register_forward_pre_hook(outside(self._enter_model), with_kwargs=True, prepend=True)
        model.register_forward_hook(outside(self._leave_model), always_call=True)
        refuse_renormalising(model, any(part.flat.index.ranks > 1 for part in self._parts.all))
        self._watch_units()
        self._watch_updates()

    def take_parts(self, new: Sequence[Part]) -> None:
        """Follow the parameters of parts that replace others, and their buffers."""
        self.writes.take_parts(new)
        self._find_homes()

    def _find_homes(self) -> None:
        self._homes = {
            place_of(part.weights.full): (number, part.weights)
            for number, parts in enumerate(self._parts.of_units)
            for part in parts
            if part.weights.sliced and self._gatherer.passes
        }

    @property
    def running(self) -> bool:
        """Whether a forward or a backward of the model is under way."""
        return bool(self._open or self.lone.open) or torch._C._current_graph_task_id() != -1

    def bring(self, unit: int, parameter: str) -> None:
        """Gather a unit for a module of another unit, which reads one of its parameters."""
        self._need(unit)
        if self._open:
            self._visitors.append(unit)
        elif self.lone.open:
            self.lone.needs(unit)

    def need(self, unit: int, module: nn.Module, ended: bool = False) -> None:
        """Gather a unit for a module that is about to run, also outside of the model's forward ([Note: lone calls]).

        Args:
            ended: whether `after` of the unit's hooks is called when the module has run.
        """
        alone = not self._open and torch._C._current_graph_task_id() == -1
        if alone and (self.lone.open or not self._gatherer.all_gathered):
            if not self.lone.open:
                self._backward.forget_interrupted()
                if torch.is_grad_enabled():
                    self.unfreeze()
            self.lone.begin(module, unit, ended)
        self._need(unit)

    def method(self) -> AbstractContextManager[Callable[[Any], Any]]:
        """The call inside of a method besides `forward`; gives the function to be applied to its output."""
        return self.lone.method() if self._homes and not self._gatherer.all_gathered else nullcontext(lambda out: out)

    def _need(self, unit: int) -> None:
        """Gather a unit, in a backward that a recomputation begins before any other hook."""
        if not self._open and torch._C._current_graph_task_id() != -1:
            self._backward.begin()
        with outside_transforms():
            self._gatherer.need(unit)

    @contextmanager
    def gathered(self, unit: int) -> Iterator[None]:
        """Gather a unit for a recomputed forward; its backward may come later."""
        self._need(unit)
        yield
        self._gatherer.done(unit, computed_again=True)

    def transformed(self, unit: int) -> bool:
        """Whether a module of a unit runs inside of a transform of `torch.func`, as without an engine.

        Raises:
            PlanError: the unit is on other ranks, and the transform takes gradients.
        """
        if not transforming():
            return False
        if runs_saved_hooks() and (self._open or self.lone.open):
            return bool(self._open) and self._open[-1].plainly
        present = all(part.weights.residence not in ABSENT for part in self._parts.of_units[unit])
        if not (present or runs_saved_hooks()):
            raise absent_in_transform(self._parts.units[unit].label)
        return present

    def leaving(self, output: Any, unit: int | None = None) -> Any:
        """A module's output, with copies of the tensors that lie in a buffer about to be emptied.

        Args:
            unit: whose buffers; all by default.
        """

        def goes(tensor: torch.Tensor) -> bool:
            home = self._homes.get(place_of(unwrapped(tensor)))
            return home is not None and unit in (None, home[0])

        if any(map(goes, tensors_in(output))):
            return with_tensors(output, lambda tensor: tensor.clone() if goes(tensor) else tensor)
        return output

    def _watch_units(self) -> None:
        """Gather each sliced unit before its use, and free it after."""
        if not self._homes:
            return
        root = self._parts.units[self._root].module
        for unit in self._parts.units:
            watch = _Watch(self, self._gatherer, self._backward, unit.number)
            for owner in unit.owners:
                if owner is not root and owner is not unit.module:
                    owner.register_forward_pre_hook(Hook(watch.before_owner), prepend=True)
            if unit.number != self._root:
                unit.module.register_forward_pre_hook(outside(watch.before), prepend=True, with_kwargs=True)
                unit.module.register_forward_hook(outside(watch.after), with_kwargs=True, always_call=True)

    def _watch_updates(self) -> None:
        """Wait for each unit's new weights before its use; for the root's when the model is entered."""
        for number in self._late.awaited(range(self._root)):
            unit = self._parts.units[number]
            wait = _Wait(self._late, number)
            unit.module.register_forward_pre_hook(outside(wait.before), prepend=True)
            for module in {*unit.owners} - {unit.module}:
                module.register_forward_pre_hook(Hook(wait.before_owner), prepend=True)

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if (compiler := active_compiler()) is not None:
            check_compiler(compiler)
        began, plainly = self._late.background.now(), self.transformed(self._root)
        with outside_transforms():
            begins = not plainly and self._begin(module, args, kwargs)
            if plainly:
                self._late.finish()
        hooks = None
        if torch.is_grad_enabled() and not plainly and (self._homes or self._counts or self.saver.moves):
            hooks = HooksOfForward(*self.hooks)
            hooks.__enter__()
        self._open.append(_Call(hooks, begins, began, plainly))
        return self._cast(args, kwargs)

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> bool:
        """Begin a forward of the model, with its root gathered; returns whether it is a pass of its own."""
        begins = False
        torch.clear_autocast_cache()  # weights have changed since, where one torch.autocast is around several steps
        self._backward.forget_interrupted()
        self._late.entering(self._root, trains=torch.is_grad_enabled())
        if not (self.writes.allowed or self._open):
            self.writes.reconcile()
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.unfreeze()
            losses = self._backward.losses
            losses.batches.add((args, kwargs))
            losses.passes.begin(model.training, losses.updates)
        if self._gatherer.passes and not self._gatherer.all_gathered:
            if torch._C._current_graph_task_id() != -1:
                self._backward.begin()  # the whole model is being recomputed
            if not self._gatherer.inside(PassKind.BACKWARD):
                self._gatherer.begin(PassKind.FORWARD if torch.is_grad_enabled() else PassKind.EVALUATION)
                begins = True
            self._gatherer.need(self._root)
        self._counts = self._ledger.recording or self._ledger.limits_activations
        if self._counts or self.saver.moves:
            self._known = {place_of(buffer) for part in self._parts.all for buffer in part.versions.buffers}
        return begins

    def _cast(self, args: Any, kwargs: Any) -> Any:
        """The inputs of the model in the dtype of computation."""
        cast = self._precision.cast_inputs
        return (args, kwargs) if self._precision.compute is None else (cast(args), cast(kwargs))

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._open:
            return None  # entering it has failed
        if output is None and (error := sys.exc_info()[1]) is not None:
            explain_clash(error, module, self._precision)
            explain_transform(error)
            if torch.is_grad_enabled():
                self._backward.losses.passes.fail(error)
        call = self._open.pop()
        if call.hooks is not None:
            call.hooks.__exit__(None, None, None)
        output = self.leaving(output) if call.begins else output
        with outside_transforms():
            if sys.exc_info()[0] is None:
                self._late.finish()
            self._late.background.note("forward", call.began)
            if call.begins:
                if output is None and sys.exc_info()[0] is not None:  # the others hear of it when this rank ends
                    self._gatherer.abandon()
                    self._visitors.clear()
                    return None
                for unit in (self._root, *self._visitors):
                    self._gatherer.done(unit)
                self._visitors.clear()
                self._gatherer.end()
        updates, number = self._backward.losses.updates, self._backward.losses.passes.latest
        listen(output, partial(self._backward.on_output_gradient, updates, number))
        return output

    def _pack(self, tensor: torch.Tensor) -> Any:
        home = self._homes.get(place_of(tensor))
        if home is not None:
            return _SavedWeight(tensor, *home)
        if tensor.is_leaf and isinstance(tensor, nn.Parameter):
            return values_of(tensor)  # and not the parameter, which may have other values by the time of the backward
        if place_of(tensor) in self._known:
            return tensor
        packed = self.saver.pack(tensor) if self.saver.moves else Kept(tensor)
        return self._counted(tensor, packed) if isinstance(packed, Kept) else Stored(packed)

    @property
    def hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """The hooks of saved tensors; torch.compile would trace the first where a block is compiled in place."""
        return torch.compiler.disable(self._pack), self._unpack

    def hold(self, tensor: torch.Tensor) -> Kept:
        """Keep a tensor on the device until its backward is over."""
        held = Kept(tensor)
        held.counted = self._counted(tensor, None)
        return held

    def _counted(self, tensor: torch.Tensor, packed: Any) -> Stored:
        counts = self._counts and self._ledger.saved.counts(tensor)
        return CountedTensor(tensor, packed, self._ledger.saved) if counts else Stored(packed)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedWeight):
            self._backward.begin()
            self._gatherer.need(saved.unit)
            if torch.is_grad_enabled() and not (self._open or self.lone.open):
                return saved.weight().detach().clone()  # which the graph of this backward keeps ([Note: saved weights])
            return saved.weight()
        if isinstance(saved, torch.Tensor):
            return saved
        return saved.saved.tensor() if isinstance(saved.saved, Kept) else self.saver.unpack(saved.saved)

    def end_step(self) -> None:
        """Wait for saved tensors on their way, and drop prefetched activations that no backward read."""
        if self.saver.moves:
            self.saver.settle()


@dataclass(slots=True)
class _Call:
    """A call of the model under way.

    Attributes:
        hooks: of saved tensors.
        begins: whether it has begun a pass.
        began: the time.
        plainly: whether it computes as without an engine, in a transform ([Note: transforms]).
    """

    hooks: saved_tensors_hooks | None
    begins: bool
    began: float
    plainly: bool


class _Wait:
    """The hooks of a unit whose new weights arrive after the step."""

    __slots__ = ("late", "unit")

    def __init__(self, late: LateUpdates, unit: int) -> None:
        self.late, self.unit = late, unit

    def before(self, module: nn.Module, args: Any) -> None:
        """Wait before the forward of the unit."""
        with outside_transforms():
            self.late.need(self.unit)

    def before_owner(self, module: nn.Module, args: Any) -> None:
        """Wait before the forward of a module that holds one of its parameters; in a graph the unit has waited."""
        if not torch.compiler.is_dynamo_compiling():
            self.before(module, args)


class _SavedWeight:
    """A saved tensor that lives in the gathered buffer of a unit."""

    __slots__ = ("tensor", "unit", "weights")

    def __init__(self, tensor: torch.Tensor, unit: int, weights: Weights) -> None:
        self.tensor, self.unit, self.weights = tensor, unit, weights

    def weight(self) -> torch.Tensor:
        """The same view with its values, in the buffer where the unit is gathered now."""
        saved = self.tensor
        if saved.untyped_storage().nbytes():
            return saved
        return self.weights.full.as_strided(saved.shape, saved.stride(), saved.storage_offset())


class _Watch:
    """The hooks of one unit."""

    __slots__ = ("backward", "forward", "gatherer", "unit")

    def __init__(self, forward: Forward, gatherer: Gatherer, backward: Backward, unit: int) -> None:
        self.forward, self.gatherer, self.backward, self.unit = forward, gatherer, backward, unit

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Gather the unit before its forward, and free it once the backward has reached its inputs."""
        if self.forward.transformed(self.unit):
            return
        self.forward.need(self.unit, module, ended=True)
        if torch.is_grad_enabled() and not self.gatherer.inside(PassKind.BACKWARD):
            listen((args, kwargs), self._leave, first=True)

    def before_owner(self, module: nn.Module, args: Any) -> None:
        """Gather it before the forward of a module that holds one of its parameters."""
        if not torch.compiler.is_dynamo_compiling() and not self.forward.transformed(self.unit):
            self.forward.need(self.unit, module)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> Any:
        """Free it after its forward, and gather it again when the first gradient of its outputs is there.

        Arguments that it returns as they are (T5's relative positions) get their gradient after the unit's backward.
        """
        if self.forward.transformed(self.unit):
            return None
        if self.gatherer.inside(PassKind.BACKWARD):
            self.gatherer.done(self.unit, computed_again=True)
            return None
        output = self.forward.leaving(output, self.unit)
        if self.forward.lone.open:
            output = self.forward.lone.end(module, output)
        with outside_transforms():
            self.gatherer.done(self.unit)
        listen(output, self._again, besides=(args, kwargs))
        return output

    def _again(self, gradient: torch.Tensor) -> None:
        self.backward.enter(self.unit)

    def _leave(self, gradient: torch.Tensor) -> None:
        self.backward.leave()
