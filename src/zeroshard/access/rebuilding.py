"""A model that leaves its engine: for a second engine, or for the same one, made anew around new parameters.

[Note: rebuilding] An engine is made for the parameters that a model has then. When layers were added, a vocabulary
resized or parameters unfrozen, `rebuild` gives the model plain parameters again, with the values of the fp32 masters
where there are any ([Note: leaving]), and makes the engine anew in place, with the same optimizer object. The states of
each parameter object that stayed are those that it had; new parameters have none yet, as in a plain loop. A second
engine on a model takes the weights over in the same way, without states, and the first is retired.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from zeroshard.access.leaving import leave, refuse_forwards
from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CommError, PlanError
from zeroshard.units.ignored import OptimizerLike, is_ignored, mark_ignored

SHOWN = 2000  # letters of an error
_engines: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]]" = weakref.WeakKeyDictionary()
Named = dict[str, Any]
Groups = Iterable[Mapping[str, Any]]


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
        groups: Groups | Callable[[nn.Module], Groups] = (),
        *,
        plan: Any = None,
        change: Callable[[nn.Module], object] | None = None,
        initialise: Callable[[nn.Module], object] | None = None,
        example: Any = None,
    ) -> None:
        """Make the engine anew around the parameters that the model has now ([Note: rebuilding]); a collective call.

        Call it between two steps, after layers were added or replaced, a vocabulary was resized (inside of
        `gathered()`), or parameters were unfrozen; or with a function that does so. Steps, loss scale and the states of
        parameters that stayed go on; new parameters that require gradients start without states. For the time of the
        call each rank has the whole weights and states in memory. Compiled blocks and watchers of gradients are to be
        set again.

        Args:
            groups: further parameter groups, as `torch.optim.Optimizer.add_param_group` takes them, or a function of
                the changed model that returns them; new parameters that are in none of them go into the first group.
            plan: another `zs.Plan` from now on.
            change: called with the plain model, whole on every rank, to change it, alike on all ranks. Stages, tensor
                parallelism and expert parallelism need it where parameters come, go or get another shape.
            initialise: as of `Engine`, for layers on the meta device.
            example: as of `Engine`, for pipelines; by default the one before.

        Raises:
            PlanError: gradients of a step are there, the call is inside of `gathered()`, or the plan cannot. After an
                error of `change` or of the new engine this one is retired, and the model is a plain one.
            CommError: `change` or `groups` ended in an error on another rank alone, or made a model there that no
                engine takes; with that error.
        """
        engine: Any = self
        _refuse(engine, "engine.rebuild()")
        loss, mesh, loaded = engine._loss, engine.mesh, vars(engine).get("loaded")
        counts, optimizer, new = _counts(engine), engine.optimizer, plan or engine.plan
        example = getattr(engine._stage, "example", None) if example is None else example
        left, model, kind = leave(engine, "engine.rebuild()"), self.model, type(engine)
        _engines.pop(model, None)
        vars(engine).clear()
        gc.collect()  # the buffers of the old parts are in rings
        try:
            with _shared_failure(mesh):
                if change is not None:
                    change(model)
                _regroup(optimizer, model, new.ignored, groups(model) if callable(groups) else groups)
                kind._check_model(model)  # before the new engine meets the other ranks
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            states = {names[id(p)]: own for p, shape, own in left if id(p) in names and p.shape == shape}
            del left
            kind.__init__(engine, model, optimizer, new, mesh=mesh, loss=loss, initialise=initialise, example=example)
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
    before = dict(model.named_parameters(remove_duplicate=False))
    leave(engine, "A second engine on the same model", states=False)
    if isinstance(optimizer, torch.optim.Optimizer):
        _follow(optimizer, before, model)
    vars(engine).clear()
    engine.__class__ = RetiredEngine
    del engine
    gc.collect()
    _engines[model] = weakref.ref(new)


def _refuse(engine: Any, what: str) -> None:
    """Refuse to take a model from its engine now."""
    if engine._forward.writes.allowed:
        raise PlanError(f"{what} stands inside `with engine.gathered():`; write it after the block.")
    refuse_forwards(engine.model, what)


def _follow(optimizer: torch.optim.Optimizer, before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Give an optimizer the parameters that took the places of those of other stages.

    Args:
        before: the parameters by name, when the optimizer was made.
    """
    now = dict(model.named_parameters(remove_duplicate=False))
    moved = {id(parameter): now[name] for name, parameter in before.items() if now[name] is not parameter}
    for group in optimizer.param_groups if moved else ():
        group["params"] = list(dict.fromkeys(moved.get(id(p), p) for p in group["params"]))


@contextmanager
def _shared_failure(mesh: Mesh) -> Iterator[None]:
    """End a change of the model on all ranks when it ends in an error on one; a collective call."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    text = "" if failed is None else f"{type(failed).__name__}: {failed}"[:SHOWN]
    answers = Comm(mesh).agree_on(text, "change of engine.rebuild()")
    if failed is not None:
        raise failed
    for rank, problem in enumerate(answers):
        if problem:
            raise CommError(
                f"engine.rebuild() ended on rank {rank} in an error of `change`, `groups` or the changed model "
                f"({problem}), so it ended on all ranks, and the engine is retired. Let both do the same on every "
                f"rank; then make a new engine on all ranks, and load a checkpoint."
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
