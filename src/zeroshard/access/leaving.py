"""A model that leaves its engine: a plain module again on every rank, with whole values.

[Note: leaving] Whole tensors come from all ranks as for `engine.weights()`, as precise as they are kept. Each becomes
the values of one parameter object: the one that the optimizer shows, or the one of a part of it; of a parameter on
other stages, the one that was in the model before the cut. Then everything that the engine put on modules is taken off:
hooks, layers of forwards, methods, attributes of changed sizes. In stages, every module gets its parameters and buffers
back.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from zeroshard.access.whole_weights import WholeWeights
from zeroshard.errors import PlanError
from zeroshard.optim.states.between_steps import release
from zeroshard.parts.part import Parts
from zeroshard.pipeline.undo_cut import Parameters, parameters_before, undo_cut, with_values
from zeroshard.units.changed_attributes import change_back
from zeroshard.units.forwards import USER, layers_of, remove_all
from zeroshard.units.ignored import is_ignored
from zeroshard.zero import BufferedGradients

OURS = "zeroshard."
TABLES = (  # of a module's hooks, and the tables that say how each is called
    ("_forward_pre_hooks", ("_forward_pre_hooks_with_kwargs",)),
    ("_forward_hooks", ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
    ("_state_dict_pre_hooks", ()),
    ("_load_state_dict_pre_hooks", ()),
)
METHODS = tuple(  # modules whose classes replace methods
    f"{OURS}{name}" for name in ("access.forward_methods", "validation.model_checks", "units.compiling")
)


class LeftStates(NamedTuple):
    """The optimizer's states of one parameter of a model that has left its engine.

    Attributes:
        shape: of the parameter then.
    """

    parameter: nn.Parameter
    shape: torch.Size
    states: Any


def leave(engine: Any, what: str, states: bool = True) -> list[LeftStates]:
    """Give the model plain parameters and modules; returns the optimizer's states; a collective call.

    Args:
        what: the call, for messages.

    Raises:
        PlanError: gradients of a step are there; or the model was changed where it has not all parameters whole.
    """
    model, parts, optimizer, writes = engine.model, engine._assembly.parts, engine.optimizer, engine._forward.writes
    writes.grows = True  # new parameters are no mistake here
    engine.flush()  # microbatches in flight, too
    if engine._backward.count:
        writes.grows = False
        raise PlanError(
            f"{what} comes when gradients of a step are there. Call engine.step() or engine.zero_grad() before it."
        )
    engine._discard()
    engine._savings.wait()
    held = _parameters_of(parts)
    before, members = parameters_before(engine._stage), engine._unfreezing.members
    _refuse_changes(engine, what, held, before)
    given = optimizer.state_dict()["state"] if states else {}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters() if name in held}
    if before:  # of several versions of a parameter, the object of the user
        for group, of_group in zip(optimizer.param_groups, members, strict=True):
            held |= zip([each.name for each in of_group if each.name in held], group["params"], strict=True)
    objects = before | held
    _make_ordinary(parts, objects)
    for name, values in engine._state.wholes_of(WholeWeights, lambda: engine.steps).kept():
        if name in objects and not is_ignored(objects[name]):
            objects[name] = with_values(objects[name], values)
    undo_cut(model, engine._stage, engine._state.buffers, objects, trained, engine._state.tied)
    for group, of_group in zip(optimizer.param_groups, members, strict=True) if before else ():
        group["params"] = [objects[member.name] for member in of_group]
    engine.world.agree(b"", "the model has left its engine")
    owners = {module for unit in parts.units for module in (unit.module, *unit.owners)}
    for module in {*model.modules(), *owners}:
        _scrub(module)
    release(optimizer)
    own = (objects[member.name] for of_group in members for member in of_group)
    return [LeftStates(p, p.shape, given[number]) for number, p in enumerate(own) if number in given]


def _parameters_of(parts: Parts) -> Parameters:
    """The parameters that have a flat on this rank."""
    every = (zip(part.flat.index.entries, part.flat.parameters, strict=True) for part in parts.all)
    return {entry.name: parameter for of_part in every for entry, parameter in of_part}


def _refuse_changes(engine: Any, what: str, held: Parameters, before: Parameters) -> None:
    """Refuse changes of a model of which this rank has parts alone; a collective call then.

    Args:
        held: the parameters that have a flat on this rank.
        before: those of all stages before the cut.
    """
    parts, known = engine._assembly.parts, engine._state.tied
    cut = {name for part in parts.all for name in part.splits}
    if not (before or cut):
        return
    named = dict(engine.model.named_parameters(remove_duplicate=False))
    first = {name: known.get(name, name) for name in named}
    replaced = [name for name in named if held.get(first[name], named[name]) is not named[name]]
    found = {first[name] for name in named if not is_ignored(named[name])}
    wanted = {name for name, parameter in {**before, **held}.items() if not is_ignored(parameter)}
    mine = [*replaced, *sorted(found ^ wanted)][:1]
    for problem in engine.world.agree_on(mine, "the parameters of the model"):
        if problem:
            engine._forward.writes.grows = False
            raise PlanError(
                f"{what} finds that '{problem[0]}' is new, was replaced or is gone, in a model of which each rank has "
                f"a part alone. Make such changes in a function: engine.rebuild(change=function) calls it with the "
                f"plain model, whole on every rank."
            )


def refuse_forwards(model: nn.Module, what: str) -> None:
    """Refuse a forward that the user has set around layers of an engine, which cannot be taken off then.

    Raises:
        PlanError: there is one.
    """
    for path, module in model.named_modules():
        outer, *layers = layers_of(module)
        if outer == USER and len(layers) > 1:
            raise PlanError(
                f"{what} finds a forward of {path!r} that was set after the engine was made, around what the engine "
                f"had put there. Take it off (del module.forward, or set the one before), and set it again afterwards."
            )


def _make_ordinary(parts: Parts, objects: Parameters) -> None:
    """Make parameters ordinary ones, with the user's hooks alone."""
    lists = [cast(BufferedGradients, part.gradients).shown.fresh for part in parts.all if part.gradients is not None]
    for part in parts.all:
        part.flat.unwatch()
    for parameter in (parameter for parameter in objects.values() if not is_ignored(parameter)):
        if type(parameter).__module__.startswith(OURS):  # of another version than the flat's
            parameter.__class__ = nn.Parameter
        parameter.grad = None
        for hooks in filter(None, (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)):
            for key in [key for key, hook in hooks.items() if _is_ours(hook, lists)]:
                del hooks[key]


def _scrub(module: nn.Module) -> None:
    """Remove an engine's hooks, layers, methods and attributes from a module."""
    for name, others in TABLES:
        table = getattr(module, name)
        for key in [key for key, hook in table.items() if _is_ours(getattr(hook, "hook", hook))]:
            for each in (table, *(getattr(module, other) for other in others)):
                each.pop(key, None)
    remove_all(module)
    for name in [name for name, value in vars(module).items() if type(value).__module__ in METHODS]:
        del vars(module)[name]
    change_back(module)


def _is_ours(hook: Any, lists: Sequence[list[Any]] = ()) -> bool:
    """Whether a hook is an engine's; `lists` are those whose `append` is one."""
    target = getattr(hook, "func", hook)
    owner = getattr(target, "__self__", None)
    if isinstance(owner, list):
        return any(owner is each for each in lists)
    return str(getattr(target, "__module__", "")).startswith(OURS)
