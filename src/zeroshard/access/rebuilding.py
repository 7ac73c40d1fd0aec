"""A model that leaves its engine: for a second engine, or for the same one, made anew around new parameters.

[Note: rebuilding] An engine is made for the parameters that a model has then. When layers were added, a vocabulary
resized or parameters unfrozen, `rebuild` gives the model plain parameters again, with the values of the fp32 masters
where there are any, and makes the engine anew in place, with the same optimizer object. The states of each parameter
object that stayed are those that it had; new parameters have none yet, as in a plain loop. A second engine on a model
takes the weights over in the same way, without states, and the first is retired.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.optim.states.between_steps import release
from zeroshard.parts.part import Part, Parts
from zeroshard.units import set_values
from zeroshard.units.forwards import remove_all
from zeroshard.units.ignored import OptimizerLike, is_ignored, mark_ignored
from zeroshard.zero import BufferedGradients

OURS = "zeroshard."
TABLES = (  # of a module's hooks, and the tables that say how each is called
    ("_forward_pre_hooks", ("_forward_pre_hooks_with_kwargs",)),
    ("_forward_hooks", ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
    ("_state_dict_pre_hooks", ()),
    ("_load_state_dict_pre_hooks", ()),
)
METHODS = (f"{OURS}access.forward_methods", f"{OURS}validation.model_checks")  # whose classes replace methods
_engines: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]]" = weakref.WeakKeyDictionary()
Named = dict[str, Any]


class RetiredEngine:
    """An engine whose model has left it.

    Raises:
        PlanError: on any use.
    """

    def __getattr__(self, name: str) -> NoReturn:
        raise PlanError(
            f"This engine is retired, and '{name}' of it was used: another engine has taken over the weights of its "
            f"model, or rebuild() has failed and left a plain model. Use that engine, or make one of the model. To "
            f"train by turns, give each engine a part of the model, or keep one and change it: "
            f"engine.rebuild(plan=...), engine.optimizer.param_groups."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.__getattr__("__call__")

    def __repr__(self) -> str:
        return "A retired engine, whose model has another one"


class RebuildAccess:
    """The method of an engine for models that have changed."""

    model: nn.Module
    plan: Any

    def rebuild(
        self,
        groups: Iterable[Mapping[str, Any]] = (),
        *,
        plan: Any = None,
        initialise: Callable[[nn.Module], object] | None = None,
    ) -> None:
        """Make the engine anew around the parameters that the model has now ([Note: rebuilding]); a collective call.

        Call it between two steps, after layers were added or replaced, a vocabulary was resized (inside of
        `gathered()`), or parameters were unfrozen. Steps, loss scale and the states of parameters that stayed go on;
        new parameters that require gradients start without states. For the time of the call each rank has the whole
        weights and states in memory. Compiled blocks and watchers of gradients are to be set again.

        Args:
            groups: further parameter groups, as `torch.optim.Optimizer.add_param_group` takes them; new parameters
                that are in none of them go into the first group.
            plan: another `zs.Plan` from now on.
            initialise: as of `Engine`, for layers on the meta device.

        Raises:
            PlanError: gradients of a step are there, the call is inside of `gathered()`, or the plan cannot. After an
                error of the new engine this one is retired, and the model is a plain one.
        """
        engine: Any = self
        _refuse(engine, "engine.rebuild()")
        loss, mesh, loaded = engine._loss, engine.mesh, vars(engine).get("loaded")
        counts, optimizer, new = _counts(engine), engine.optimizer, plan or engine.plan
        states, model, kind = _leave(engine), self.model, type(engine)
        vars(engine).clear()
        gc.collect()  # the buffers of the old parts are in rings
        try:
            _regroup(optimizer, model, new.ignored, groups)
            kind.__init__(engine, model, optimizer, new, mesh=mesh, loss=loss, initialise=initialise)
        except BaseException:
            engine.__class__ = RetiredEngine
            raise
        if loaded is not None:
            engine.loaded = loaded
        _put_states(engine, states)
        _go_on(engine, counts)


def retire_engine(model: nn.Module, optimizer: OptimizerLike, new: Any) -> None:
    """Retire the engine of a model, if it has one; a collective call then.

    Args:
        optimizer: of the engine that takes the model over.
        new: this engine.

    Raises:
        PlanError: that is the optimizer of the first engine; or the first cannot leave the model now.
    """
    known = _engines.get(model)
    engine = None if known is None else known()
    if engine is None or "_sent" not in vars(engine):  # or one that was refused while it was made
        _engines[model] = weakref.ref(new)
        return
    if optimizer is engine.optimizer:
        raise PlanError(
            "A second engine was given the first one's optimizer, whose states are those of its slices. Use "
            "engine.rebuild(plan=...), which keeps the states; or make an optimizer of its own."
        )
    _refuse(engine, "A second engine on the same model")
    _leave(engine, states=False)
    vars(engine).clear()
    engine.__class__ = RetiredEngine
    del engine
    gc.collect()
    _engines[model] = weakref.ref(new)


def _refuse(engine: Any, what: str) -> None:
    """Refuse to take a model from its engine now, or at all."""
    plan = engine.plan
    if engine._forward.writes.allowed:
        raise PlanError(f"{what} stands inside `with engine.gathered():`; write it after the block.")
    if engine._backward.count:
        raise PlanError(
            f"{what} comes when gradients of a step are there. Call engine.step() or engine.zero_grad() before it."
        )
    settings = {
        f"pipeline_parallel={plan.pipeline.stages}": plan.pipelined,
        f"tensor_parallel={plan.tensor.ranks}": plan.tensor.splits,
        f"expert_parallel={plan.experts.ranks}": plan.experts.divides,
        f"loss_chunk={plan.loss_chunk}": plan.loss_chunk is not None,
    }
    for setting in (setting for setting, found in settings.items() if found):
        raise PlanError(
            f"{what} and {setting} do not combine: modules of the model were changed for it. Call engine.save(folder), "
            f"build the model again, and give it to a new engine that calls load(folder) or load_weights(folder)."
        )


def _counts(engine: Any) -> Named:
    decision = engine._decision
    return {
        "steps": engine.steps,
        "skipped": engine.skipped,
        "scale": [scaler.state() for scaler in filter(None, [decision.scaler])],
        "count": engine._backward.losses.count,
        "last": decision.state(),
    }


def _go_on(engine: Any, counts: Named) -> None:
    """Go on with the counts of the engine before."""
    engine.steps, engine.skipped = counts["steps"], counts["skipped"]
    for scaler, state in zip(filter(None, [engine._decision.scaler]), counts["scale"], strict=False):
        scaler.load(state)
    engine._backward.losses.count = counts["count"]
    engine._decision.load(counts["last"])


def _leave(engine: Any, states: bool = True) -> Named:
    """Give the model plain parameters; returns the optimizer's states by their names now; a collective call."""
    writes = engine._forward.writes
    writes.grows = True  # new parameters are no mistake here
    engine._discard()
    engine.flush()
    engine._savings.wait()
    parts: Parts = engine._assembly.parts
    named = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    found = _states(engine, named) if states else {}
    for part in parts.all:
        _make_plain(part)
    engine.world.agree(b"", "the model has left its engine")
    owners = {module for unit in parts.units for module in (unit.module, *unit.owners)}
    for module in {*engine.model.modules(), *owners}:
        _scrub(module)
    release(engine.optimizer)
    _engines.pop(engine.model, None)
    return found


def _states(engine: Any, named: Mapping[int, str]) -> Named:
    """The optimizer's states of the parameters that are still in the model, by their names there."""
    held: list[list[Any]] = engine._unfreezing.members
    objects = {
        entry.name: parameter
        for part in engine._assembly.parts.all
        for entry, parameter in zip(part.flat.index.entries, part.flat.parameters, strict=True)
    }
    names = [named.get(id(objects[member.name])) for group in held for member in group]
    given = engine.optimizer.state_dict()["state"]
    return {name: given[number] for number, name in enumerate(names) if name is not None and number in given}


def _make_plain(part: Part) -> None:
    """Make the parameters of a part ordinary ones, with memory of their own, as precise as they are kept."""
    flat, index, comm = part.flat, part.flat.index, part.place.slices.comm
    with part.updater.at_hand(), torch.no_grad():
        values, start = part.updater.values, part.updater.start
        whole = torch.zeros(index.padded_numel, dtype=values.dtype, device=comm.mesh.device)
        whole[start : start + values.numel()].copy_(values)
    for rank in range(index.ranks) if index.ranks > 1 else ():
        low, high = index.interval(rank)
        if high > low:
            comm.broadcast(whole[low:high], f"whole {flat.label}", rank)
    ours = [cast(BufferedGradients, part.gradients).shown.fresh] if part.gradients is not None else []
    flat.unwatch()
    for number, parameter in enumerate(flat.parameters):
        set_values(parameter, flat.view(whole, number).cpu())  # where a second engine's buffers are not in the way
        parameter.grad = None
        for hooks in filter(None, (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)):
            for key in [key for key, hook in hooks.items() if _is_ours(hook, ours)]:
                del hooks[key]


def _scrub(module: nn.Module) -> None:
    """Remove an engine's hooks, layers and methods from a module."""
    for name, others in TABLES:
        table = getattr(module, name)
        for key in [key for key, hook in table.items() if _is_ours(getattr(hook, "hook", hook))]:
            for each in (table, *(getattr(module, other) for other in others)):
                each.pop(key, None)
    remove_all(module)
    for name in [name for name, value in vars(module).items() if type(value).__module__ in METHODS]:
        del vars(module)[name]


def _is_ours(hook: Any, lists: Sequence[list[Any]] = ()) -> bool:
    """Whether a hook is an engine's; `lists` are those whose `append` is one."""
    target = getattr(hook, "func", hook)
    owner = getattr(target, "__self__", None)
    if isinstance(owner, list):
        return any(owner is each for each in lists)
    return str(getattr(target, "__module__", "")).startswith(OURS)


def _regroup(
    optimizer: torch.optim.Optimizer, model: nn.Module, ignored: Sequence[str], groups: Iterable[Mapping[str, Any]]
) -> None:
    """Set the parameters of an optimizer's groups: those that stayed, and new ones."""
    mark_ignored(model, ignored)
    here = {id(parameter) for parameter in model.parameters() if not is_ignored(parameter)}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in here]
    for further in groups:
        optimizer.add_param_group(dict(further))
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    new = [p for p in model.parameters() if p.requires_grad and id(p) in here and id(p) not in known]
    optimizer.param_groups[0]["params"] += new


def _put_states(engine: Any, states: Named) -> None:
    """Load states by name; parameters without any have none."""
    if not states:
        return
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [each.name for each in members]}
        for group, members in zip(engine.optimizer.param_groups, engine._unfreezing.members, strict=True)
    ]
    engine.optimizer.load_state_dict({"state": states, "param_groups": groups})
