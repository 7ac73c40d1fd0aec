"""`Plan.auto`: the fastest plan for a model and a batch of a program, by one search for all ranks of a job."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard import errors
from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh, init_mesh
from zeroshard.doctor.hardware import Machines
from zeroshard.errors import BatchError, CommError, ModelError, PlanError, ZeroshardError
from zeroshard.plan import SEARCHED, Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.copies import zeroed_copy
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Found, Refusal
from zeroshard.planner.predict.torch_internals import is_fake
from zeroshard.planner.search.identity import identity_of
from zeroshard.planner.search.kept import search_once
from zeroshard.planner.search.search import Say
from zeroshard.planner.search.text import alike, describe, looked_at, short
from zeroshard.planner.search.this_machine import local_machines
from zeroshard.planning.settings import check_whole, flat

NAMED = 2  # kinds of refusals that are shown


def plan_for(
    model: nn.Module,
    batch: Any,
    optimizer: Any,
    machines: Machines | None,
    ranks: int | None,
    base: Plan | None,
    say: Say,
    fresh: bool,
) -> Plan:
    """See `Plan.auto`."""
    base = base or Plan()
    if machines is not None and not isinstance(machines, Machines):
        raise PlanError(
            f"machines is {machines!r}; give zeroshard.doctor.hardware.Machines.of(...), or leave it out for this "
            f"machine."
        )
    if ranks is not None:
        check_whole("ranks", ranks)
    if machines is not None and ranks not in (None, machines.count):
        raise PlanError(f"ranks is {ranks} and machines have {machines.count} devices; leave one of the two out.")
    mesh = init_mesh(base.timeout)
    count = machines.count if machines is not None else ranks or mesh.ranks
    hardware = machines or local_machines(count, mesh.device.type)
    task = task_of(model, batch, optimizer, count)

    def work(tell: Say) -> dict[str, Any]:
        with failures_of(type(model).__name__):
            found = best_plans(task, hardware, base, tell, fresh)
        return {"plan": found.best[0].plan.as_dict(), "lines": why(found)}

    with torch.random.fork_rng(devices=[]):  # rehearsals do not change the program's generator
        together = count == mesh.ranks > 1
        answer = on_rank_zero(mesh, work, "planning", say) if together else work(say)
    for line in answer["lines"] if mesh.rank == 0 else ():
        say(line)
    return replace(Plan.from_dict(answer["plan"]), transport=base.transport)


def best_plans(task: TrainingTask, machines: Machines, base: Plan, say: Say, fresh: bool = False) -> Found:
    """The search's result, with at least one plan that fits; a kept one for the same question unless `fresh`.

    Raises:
        PlanError: no plan fits, or `base` sets fields that are searched.
    """
    refuse_chosen(base)
    room = machines.device
    if base.device_budget is not None:
        memory = min(room.memory_bytes, room.overhead_bytes + base.device_budget)
        machines = replace(machines, device=replace(room, memory_bytes=memory))
    found = search_once(task, machines, base, top=2, say=say, fresh=fresh)
    if not found.best:
        raise PlanError(_none_fits(found, machines))
    return found


@contextmanager
def failures_of(model: str) -> Iterator[None]:
    """Raise `ModelError` for any exception of a model, or of its batches, in a rehearsal."""
    try:
        yield
    except ZeroshardError:
        raise
    except Exception as error:
        raise ModelError(
            f"a step of {model} failed in a rehearsal ({type(error).__name__}: {error}), which has no values. Where "
            f"shapes depend on values, such as those of rows that `nonzero` finds, plans can be estimated by formulas "
            f"alone, and memory shows in a run of few steps; else mend the model, or its batches, until a forward and "
            f"a backward work"
        ) from error


def refuse_chosen(base: Plan) -> None:
    """Refuse given values of fields that the search chooses.

    Raises:
        PlanError: naming the first such field.
    """
    usual, given = dict(flat(Plan().as_dict())), dict(flat(base.as_dict()))
    for name in SEARCHED:
        if given[name] != usual[name]:
            raise PlanError(
                f"{name} is {given[name]!r}, and the search for a plan chooses it; leave {name} out, or do not search."
            )


def why(found: Found) -> list[str]:
    """Sentences about the best plan, the next best, and the refusals."""
    best, *others = found.best
    lines = describe(best)
    looked = f"{looked_at(found)}{', in an earlier search' * found.kept}"
    if others and best.seconds:
        behind = others[0].seconds / best.seconds - 1
        slower = f"{behind:.0%} slower" if behind >= 0.005 else "as fast"
        looked += f"; the next best is {short(others[0].plan, best.ranks)}, {slower}"
    lines.append(f"{looked}.")
    kinds = alike(found.refused)
    for refusals in kinds[:NAMED]:
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        lines.append(f"Refused: {_refused(refusals[-1], best.ranks)}{more}")
    if len(kinds) > NAMED:
        lines.append(f"Refused besides: {sum(map(len, kinds[NAMED:]))} plans for other reasons.")
    return lines


def on_rank_zero(mesh: Mesh, work: Callable[[Say], Any], label: str, say: Say = lambda text: None) -> Any:
    """Run `work` on rank 0, and return its value on all ranks; a collective call.

    Meanwhile the other ranks receive its messages, so that no wait times out.

    Args:
        work: takes a function to call with each message, and returns a JSON value.
        say: called with each message on rank 0.

    Raises:
        ZeroshardError: what `work` raised, of the same kind on every rank.
    """
    comm = Comm(mesh)

    def tell(text: str) -> None:
        say(text)
        _show_progress(mesh, comm.agree_on({"text": text}, label)[0])

    if mesh.rank != 0:
        while "text" in (answer := comm.agree_on(None, label)[0]):
            _show_progress(mesh, answer)
        if "error" in answer:
            raise getattr(errors, answer["kind"])(answer["error"])
        return answer["value"]
    try:
        value = work(tell)
    except CommError:
        raise
    except ZeroshardError as error:
        comm.agree_on({"error": str(error), "kind": type(error).__name__}, label)
        raise
    comm.agree_on({"value": value}, label)
    return value


def task_of(model: nn.Module, batch: Any, optimizer: Any, ranks: int) -> TrainingTask:
    """The task of training a module on such batches.

    Raises:
        PlanError: the model or the optimizer is none, or weights are quantised. ModelError: it has no parameter to
            train. BatchError: the batch has no common first dimension.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"The model is a {type(model).__name__}; a plan is made for an nn.Module.")
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or type(parameter.data).__module__.startswith("torchao"):
            raise PlanError(
                f"{name} is quantised ({parameter.dtype}), and a rehearsal has no copies of such weights; plan this "
                f"model in floating point, or its adapters by `zeroshard plan --adapters qlora`, and give that plan."
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} has no parameter to train; set requires_grad on what is to be trained."
        )
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tensors}
    if len(sizes) != 1 or 0 in sizes:
        raise BatchError(
            f"The batch's tensors have the first dimensions {sorted(sizes)}; a plan needs one batch of one rank, of "
            f"tensors [B, ...] with B of 1 or more."
        )
    picked = [leaf for leaf in tensors if leaf.dim() > 1 and not leaf.is_floating_point()]
    if isinstance(optimizer, torch.optim.Optimizer):
        make, whole = _maker_of(optimizer, model), True
    elif callable(optimizer):
        make, whole = optimizer, False
    else:
        raise PlanError(
            f"The optimizer is {optimizer!r}; give a torch.optim class, such as torch.optim.AdamW, or a function of "
            f"the parameters."
        )
    return TrainingTask(
        build=lambda: zeroed_copy(model),
        batch=lambda rows: tree_map(lambda leaf: _rows(leaf, rows), batch),
        optimizer=make,
        rows=sizes.pop() * ranks,
        sequence=picked[0].shape[1] if picked else 1,
        name=type(model).__name__,
        whole_model=whole,
        made_aside="whole" if any(parameter.device.type == "cpu" for parameter in model.parameters()) else "",
        identity=identity_of(model, batch, optimizer),
    )


def _show_progress(mesh: Mesh, answer: dict[str, str]) -> None:
    """Write a message into the heartbeat, as progress of the rank."""
    if mesh.heartbeat is not None:
        mesh.heartbeat.phase(f"planning: {answer['text']}")


def _rows(leaf: Any, rows: int) -> Any:
    """A batch's leaf with so many rows, repeated where it has fewer."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_meta or is_fake(torch.empty(0)):
        return torch.zeros(rows, *leaf.shape[1:], dtype=leaf.dtype)
    return leaf.detach().cpu()[torch.arange(rows) % len(leaf)]


def _maker_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A function that makes the same optimizer for a copy of the model.

    Raises:
        PlanError: it holds other parameters than the model's.
    """
    kind: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = type(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for group in optimizer.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise PlanError("The optimizer holds parameters that are not the model's; make it from model.parameters().")
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append((options, [names[id(parameter)] for parameter in group["params"]]))

    def make(other: nn.Module) -> torch.optim.Optimizer:
        parameters = dict(other.named_parameters())
        filled = ({**o, "params": [parameters[n] for n in known if n in parameters]} for o, known in groups)
        try:
            return kind([group for group in filled if group["params"]])
        except TypeError as error:
            raise PlanError(
                f"{type(optimizer).__name__} cannot be made again from its groups ({error}); give a function of the "
                f"parameters instead of the optimizer."
            ) from error

    return make


def _none_fits(found: Found, machines: Machines) -> str:
    """The error if no plan fits, with the refusal of the model, or the nearest one: the most offloaded, or sliced."""
    if not found.refused:
        return f"There is no plan to look at for {machines}; use more rows."
    (most, *_) = max(alike(found.refused), key=len)
    if not most.way_out and not any(refusal.prediction for refusal in found.refused):
        return f"No plan trains this model, of {len(found.refused)} that were tried. {most.why}"
    with_way = [refusal for refusal in found.refused if refusal.way_out]
    resorts = [refusal for refusal in with_way if _resort(refusal)]
    closest = max(resorts or with_way or found.refused, key=_reach)
    resorted = f", with and without {_resort(closest)}" if resorts else ""
    return f"None of {len(found.refused)} plans fits {machines}{resorted}. {_refused(closest, machines.count)}"


def _resort(refusal: Refusal) -> str:
    """The last resort that a refused plan uses; empty without one."""
    return "".join(choice.resort for choice in choices_of(refusal.plan))


def _reach(refusal: Refusal) -> tuple[float, ...]:
    """Sort key of refused plans by memory saved: last resorts first."""
    return tuple(part for choice in reversed(choices_of(refusal.plan)) for part in choice.reach)


def _refused(refusal: Refusal, ranks: int) -> str:
    return f"{short(refusal.plan, ranks)}: {refusal.why} {refusal.way_out}".rstrip()
