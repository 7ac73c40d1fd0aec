"""Hooks along the forward: units come when they are needed and go when they are done; the user's classes stay
untouched.

[Note: saved weights] Autograd saves weights, or views of them, for the backward. A saved tensor that lives in a
gathered buffer is kept as it is (it pins no memory, the storage is emptied under it) and its unit is gathered again
before the saved tensor is read, whatever way the backward came there.
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from zeroshard.engine.assembly import Assembly
from zeroshard.engine.backward import Backward
from zeroshard.errors import PlanError
from zeroshard.ledger import Category, Ledger
from zeroshard.zero import Gatherer, PassKind


class Forward:
    """Installs and holds the forward hooks of one model."""

    def __init__(
        self, model: nn.Module, assembly: Assembly, gatherer: Gatherer | None, backward: Backward, ledger: Ledger
    ) -> None:
        self._assembly, self._gatherer, self._backward, self._ledger = assembly, gatherer, backward, ledger
        self._root = len(assembly.units) - 1
        self._open: list[tuple[saved_tensors_hooks | None, bool]] = []
        self._unit_of_storage = {
            shard.parameters.full.untyped_storage()._cdata: number
            for number, shards in enumerate(assembly.shards)
            for shard in shards
            if shard.parameters.sliced
        }
        self._activations: dict[int, int] = {}
        model.register_forward_pre_hook(self._enter_model, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._leave_model, always_call=True)
        if gatherer is not None:
            self._watch_units(gatherer)

    def _watch_units(self, gatherer: Gatherer) -> None:
        for unit, shards in zip(self._assembly.units, self._assembly.shards, strict=True):
            for owner in (owner for owner in unit.owners if owner is not self._assembly.units[self._root].module):
                owner.register_forward_pre_hook(_Need(gatherer, unit.number), prepend=True)
            if unit.number != self._root:
                unit.module.register_forward_pre_hook(_Need(gatherer, unit.number), prepend=True)
                unit.module.register_forward_hook(_Done(gatherer, unit.number, self._backward), always_call=True)
                if any(not shard.flat.trainable for shard in shards):
                    unit.module.register_forward_pre_hook(
                        _DoneAfterInputs(self._backward, unit.number), with_kwargs=True
                    )

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._backward.forget_interrupted()
        begins = False
        self._refuse_writes()
        if self._gatherer is not None:
            if not self._gatherer.inside(PassKind.BACKWARD):  # else: the whole model is being recomputed
                self._gatherer.begin(PassKind.FORWARD if torch.is_grad_enabled() else PassKind.EVALUATION)
                begins = True
            self._gatherer.need(self._root)
        hooks = None
        if torch.is_grad_enabled() and (self._gatherer is not None or self._ledger.recording):
            hooks = saved_tensors_hooks(self._pack, self._unpack)
            hooks.__enter__()
        self._open.append((hooks, begins))
        cast = self._assembly.precision.cast_inputs
        return cast(args), cast(kwargs)

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        hooks, begins = self._open.pop()
        if hooks is not None:
            hooks.__exit__(None, None, None)
        if self._gatherer is not None and begins:
            if output is None and sys.exc_info()[0] is not None:  # the others hear of it when this rank ends
                self._gatherer.abandon()
                return
            self._gatherer.done(self._root)
            self._gatherer.end()
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward.on_output_gradient)

    def _pack(self, tensor: torch.Tensor) -> Any:
        number = self._unit_of_storage.get(tensor.untyped_storage()._cdata)
        if number is not None:
            return _SavedWeight(number, tensor)
        return _Activation(tensor, self) if self._ledger.recording else tensor

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedWeight):
            self._backward.begin()
            assert self._gatherer is not None
            self._gatherer.need(saved.unit)
            return saved.tensor
        tensor: torch.Tensor = saved.tensor if isinstance(saved, _Activation) else saved
        return tensor

    def count_activation(self, storage: torch.UntypedStorage, change: int) -> None:
        """Enter a storage that autograd saved, once however many tensors share it; strike it out with the last."""
        key = storage._cdata
        before = self._activations.get(key, 0)
        self._activations[key] = before + change
        if before == 0:
            self._ledger.take(Category.ACTIVATIONS, storage.nbytes(), "save for backward")
        elif before + change == 0:
            del self._activations[key]
            self._ledger.give(Category.ACTIVATIONS, storage.nbytes(), "saved activation")

    def _refuse_writes(self) -> None:
        """Refuse to go on with what was written where it is lost, or done once per rank to what all ranks share.

        Raises:
            PlanError: with the way out.
        """
        for shard in self._assembly.all_shards:
            parameters = shard.parameters
            lost = "its values were on other ranks" if parameters.sliced and shard.flat.written_while_absent() else None
            if (shard.master or parameters.common) and shard.versions is None and shard.flat.edits != shard.edits:
                lost = "all ranks share it" if parameters.common else "its fp32 master weights stayed as they were"
            if lost:
                raise PlanError(
                    f"A parameter of {shard.flat.label} was written while {lost}. Change parameters inside "
                    f"`with engine.gathered():`, on every rank alike."
                )


class _SavedWeight:
    """A saved tensor that lives in the gathered buffer of a unit."""

    __slots__ = ("tensor", "unit")

    def __init__(self, unit: int, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.tensor = tensor


class _Activation:
    """A saved tensor counted in the ledger for as long as the graph holds it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor, counter: Forward) -> None:
        self.tensor = tensor
        counter.count_activation(tensor.untyped_storage(), 1)
        weakref.finalize(self, counter.count_activation, tensor.untyped_storage(), -1)


class _Need:
    __slots__ = ("gatherer", "unit")

    def __init__(self, gatherer: Gatherer, unit: int) -> None:
        self.gatherer, self.unit = gatherer, unit

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.gatherer.need(self.unit)


class _Done(_Need):
    """Frees a unit after its forward, and has it back when the first gradient of its outputs is there."""

    __slots__ = ("backward",)

    def __init__(self, gatherer: Gatherer, unit: int, backward: Backward) -> None:
        super().__init__(gatherer, unit)
        self.backward = backward

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if self.gatherer.inside(PassKind.BACKWARD):
            return
        self.gatherer.done(self.unit)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._again)

    def _again(self, gradient: torch.Tensor) -> None:
        self.backward.begin()
        self.gatherer.need(self.unit)


class _DoneAfterInputs:
    """Frees a unit with frozen weights once the gradients of its inputs are there: its own may come before that."""

    __slots__ = ("backward", "unit")

    def __init__(self, backward: Backward, unit: int) -> None:
        self.backward, self.unit = backward, unit

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            watched: Sequence[Any] = tree_leaves((args, kwargs))
            for leaf in watched:
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._done)
                    return

    def _done(self, gradient: torch.Tensor) -> None:
        self.backward.inputs_done(self.unit)
