"""The user's view of the optimizer between the engine's steps: by parameter, whole, or refused.

In its steps the optimizer has slices. Between them its groups hold the model's parameters, for schedules, callbacks and
comparisons; its states are read and loaded by parameter. Methods of the user's class that write parameters or states
outside of `step` (swapping in an average, the modes of 2405.15682) run over the slices of every rank, and all ranks get
the new weights; a trial over small tensors shows the effect of a method.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from types import FunctionType
from typing import Any, NoReturn, Protocol

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.errors import OptimizerError
from zeroshard.optim.slices.spans import HeldTensors, SpanOptimizer, put_back
from zeroshard.optim.slices.step_hooks import WatchedHook
from zeroshard.optim.states.by_parameter import ByParameter, given_parameter, shown_parameters
from zeroshard.optim.states.other_forms import Members
from zeroshard.optim.trial.dependence import Effect, MethodCall, effect_of
from zeroshard.parts.part import Parts

BOUND = "of_engine"  # an attribute of methods that an engine has put on an optimizer
TORCHS = frozenset(vars(torch.optim.Optimizer))


class Assembled(Protocol):
    """An optimizer over the slices of the parts of a model."""

    optimizer: SpanOptimizer
    parts: Parts


class BetweenSteps:
    """The user's calls of an engine's optimizer between steps.

    The optimizer, which may outlive it, has a weak reference.

    Args:
        world: all ranks.
        members: the parameters of each group, as the user gave them.
        discard: called with `set_to_none`: drop the gradients, or else zero them and still apply them.
        flush: wait for pending updates; a collective call.
    """

    def __init__(
        self,
        assembly: Assembled,
        world: Comm,
        members: Members,
        discard: Callable[[bool], None],
        flush: Callable[[], None],
    ) -> None:
        self._spans, self._parts, self._world = assembly.optimizer, assembly.parts, world
        self._members = members
        optimizer, parts = self._spans, self._parts
        self._states = ByParameter(optimizer, parts, world, members)
        self._called: dict[str, MethodCall] = {}  # latest calls that wrote; they may have made states
        self._discard, self._flush = weakref.WeakMethod(discard), weakref.WeakMethod(flush)
        optimizer.held.show(list(shown_parameters(parts, members)), ShownStates(optimizer))
        user = optimizer.optimizer
        calls: dict[str, Callable[..., Any]] = {
            name: partial(BetweenSteps.call, name=name) for name in _methods(type(user))
        }
        calls |= {"zero_grad": BetweenSteps.zero_grad, "add_param_group": BetweenSteps.add_group}
        calls |= {"state_dict": BetweenSteps.state_dict, "load_state_dict": BetweenSteps.load_state_dict}
        for name, call in calls.items():
            setattr(user, name, _bound(self, user, name, call))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients in the engine."""
        discard = self._discard()
        if discard is not None:
            discard(set_to_none)

    def add_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of frozen parameters, which are trained once they require gradients; a collective call.

        Raises:
            OptimizerError: some are not in the model, in a group already, or not on every rank.
        """
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        entries = ((part.flat, n) for part in self._parts.all if part.gradients is None
                   for n in range(len(part.flat.parameters)))  # fmt: skip
        names = {id(flat.parameters[n]): flat.index.entries[n].name for flat, n in entries}
        taken = {member.name for group in self._members for member in group}
        fits = bool(given) and all(names.get(id(p), "") not in {"", *taken} for p in given)
        if not all(self._world.agree_on(fits, "engine.optimizer.add_param_group()")):
            raise OptimizerError(
                "add_param_group was called after the engine was made with parameters that it cannot add: each must be "
                "one of the model's that was frozen when the engine was made, in no group, and on every rank (not in "
                "one stage of several). Put all parameters into the optimizer first, and freeze those that are to be "
                "trained later with requires_grad_(False)."
            )
        optimizer = self._spans.optimizer
        type(optimizer).add_param_group(optimizer, {**param_group, "params": given})
        group = optimizer.param_groups[-1]
        self._spans.sizes.templates.append({key: value for key, value in group.items() if key != "params"})
        self._members.append([given_parameter(names[id(p)], p) for p in given])
        self._spans.refill_groups()

    def state_dict(self) -> dict[str, Any]:
        """The whole state dict of the same optimizer in a plain loop, on every rank; a collective call."""
        self._settle("state_dict")
        return self._states.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Load a state dict by position or by name, the same on every rank, its shards, or rank 0's; a collective call.

        Raises:
            CheckpointError: it does not fit, or differs between ranks.
        """
        self._settle("load_state_dict")
        self._states.load(state_dict)

    def call(self, *args: Any, name: str, **kwargs: Any) -> Any:
        """Call a method of the user's class; a collective call, if it writes parameters or states.

        Raises:
            OptimizerError: it reads or mixes data of which a rank has a slice.
        """
        optimizer, call = self._spans.optimizer, MethodCall(name, args, kwargs)
        effect = self._effect(call)
        if effect.refused is not None:
            raise self._refusal(name, effect.refused)
        if not effect.writes:
            return call.of(optimizer)
        problem = None
        if self._spans.owners.joined is not None:
            problem = "matrices are put together of several ranks' parts in the step alone"
        elif not all(part.versions.single for part in self._parts.all):
            problem = "the pipeline keeps several versions of the weights"
        self._settle(name, problem)
        with ExitStack() as hands:
            for part in self._parts.all:
                hands.enter_context(part.updater.at_hand(writes=True))
            spans = self._spans.every
            places = [span.tensor.data for span in spans]
            with self._spans.held.inside():
                result = call.of(optimizer)
            put_back(spans, places)
        for part in self._parts.all:
            part.updater.restore()
            part.weights.publish()
            part.weights.published()
        self._spans.account()
        self._called.pop(name, None)
        self._called[name] = call
        return result

    def _effect(self, call: MethodCall) -> Effect:
        whole = self._spans.layout.whole is not None
        try:
            return effect_of(self._spans.optimizer, call, self._called.values(), whole)
        except Exception as error:  # of the user's method
            why = f"a trial of it on small tensors ended in {type(error).__name__}: {error}"
            raise self._refusal(call.method, why) from error

    def _refusal(self, name: str, why: str) -> OptimizerError:
        kind = type(self._spans.optimizer).__name__
        return OptimizerError(
            f"{name}() of {kind} cannot run under the engine: {why}. Do it in its step, which the engine calls; or "
            f"with whole tensors: weights inside `with engine.gathered():`, states by engine.optimizer.state_dict() "
            f"and load_state_dict()."
        )

    def _settle(self, name: str, problem: str | None = None) -> None:
        """Wait for pending updates on all ranks, and raise a rank's problem on all of them."""
        flush = self._flush()
        if flush is not None:
            flush()
        answers = self._world.agree_on(problem, f"engine.optimizer.{name}()")
        problem = next(filter(None, answers), None)
        if problem is not None:
            raise self._refusal(name, problem)


class ShownStates(dict[Any, Any]):
    """Replacement of `optimizer.state`, which refuses reads: slices belong to no parameter.

    `clear()` drops the states of this rank's slices.
    """

    def __init__(self, optimizer: SpanOptimizer) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)

    def __bool__(self) -> bool:
        optimizer = self._optimizer()
        return optimizer is not None and bool(optimizer.held.states)

    def clear(self) -> None:
        """Drop all states of this rank."""
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.held.states.clear()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OptimizerError(
            "The states of the engine's optimizer were read or written by parameter, and each rank has those of its "
            "slices. engine.optimizer.state_dict() has them whole, on every rank, load_state_dict() takes them so, "
            "engine.save(folder) and engine.load(folder) keep them in files, and engine.optimizer.state.clear() drops "
            "them."
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = items = keys = values = pop = popitem = update = setdefault = _refuse


def _methods(kind: type[torch.optim.Optimizer]) -> Iterator[str]:
    """The public methods of a user's class that torch's optimizers do not have."""
    for base in kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]:
        if not base.__module__.startswith(("torch.optim.", "zeroshard.optim.")):
            found = (name for name, value in vars(base).items() if isinstance(value, FunctionType))
            yield from (name for name in found if not name.startswith("_") and name not in TORCHS)


def _bound(owner: BetweenSteps, user: torch.optim.Optimizer, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the user's optimizer that calls `owner` between steps, and the class's own method in them."""
    known, holder = weakref.ref(owner), weakref.ref(user)

    @wraps(getattr(type(user), name))
    def bound(*args: Any, **kwargs: Any) -> Any:
        owner, user = known(), holder()
        if owner is None or owner._spans.held.stepping:
            idle = owner is not None and name == "zero_grad"  # a step discards gradients itself at its end
            return None if idle else getattr(type(user), name)(user, *args, **kwargs)
        return call(owner, *args, **kwargs)

    vars(bound)[BOUND] = True
    return bound


def release(optimizer: torch.optim.Optimizer) -> None:
    """Make an engine's optimizer an ordinary one again, over the parameters that its groups show, without states."""
    for name in [name for name, value in vars(optimizer).items() if BOUND in getattr(value, "__dict__", ())]:
        delattr(optimizer, name)
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, WatchedHook):
                hooks[key] = hook.hook
            elif isinstance(getattr(hook, "__self__", None), HeldTensors):
                del hooks[key]
    optimizer.state = defaultdict(dict)
