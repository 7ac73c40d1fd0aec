"""Operations of torch as a device of paper notes them: what they read and write, on which stream, and who waits."""

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from paper import threads
from paper.record import site
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from paper.device import Paper

INSIDE = torch.device("cpu", 0)  # as C++ passes the place of a tensor on the device of paper
SYNCHRONISING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "bincount"}
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
INDEXED = {"index", "index_put_", "_index_put_impl_", "index_put"}


class Roles(NamedTuple):
    """Of an operator: its name, the arguments that it writes, by number and name, and whether its results are views."""

    name: str
    written: frozenset[int | str]
    views: bool


@cache
def roles_of(operator: Any) -> Roles:
    """The roles of an operator's arguments, from its schema."""
    written: set[int | str] = set()
    for number, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {number, argument.name}
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns)
    return Roles(operator._schema.name.partition("::")[2], frozenset(written), views)


class Operation(NamedTuple):
    """One operation that has run: its tensors and the tensors that it made."""

    roles: Roles
    read: list[Tensor]
    written: list[Tensor]
    made: list[Tensor]


def operation_of(roles: Roles, args: Any, kwargs: dict[str, Any], out: Any) -> Operation:
    """Sort the tensors of a call by what the operator does with them."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for place, argument in (*enumerate(args), *kwargs.items()):
        if isinstance(argument, (Tensor, list, tuple)):
            into = written if place in roles.written else read
            into += filter(_is_plain, tree_leaves(argument))
    given = {tensor.untyped_storage()._cdata for tensor in (*read, *written)}
    results = list(filter(_is_plain, tree_leaves(out)))
    return Operation(roles, read, written, [leaf for leaf in results if leaf.untyped_storage()._cdata not in given])


class Noting(TorchDispatchMode):
    """Notes the operations of a thread."""

    def __init__(self, paper: "Paper") -> None:
        super().__init__()
        self._paper = paper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run the operation, then note it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        roles = roles_of(func)
        if not roles.views and func.namespace != "c10d":  # collectives are noted by themselves
            with self._paper.record.lock:
                note(self._paper, operation_of(roles, args, kwargs, out), args, kwargs)
        return out


def note(paper: "Paper", operation: Operation, args: Any, kwargs: dict[str, Any]) -> None:
    """Note an operation on the current stream, or as one of this thread."""
    name, inputs = operation.roles.name, [*operation.read, *operation.written]
    tensors = [*inputs, *operation.made]
    if not tensors or any(tensor.untyped_storage().device.type == "meta" for tensor in tensors):
        return
    if _makes_on_device(paper, inputs, operation.made, kwargs):
        for tensor in operation.made:
            paper.put_on_device(tensor)
    here, record = threads.here(), paper.record
    shapes_alone = name.endswith("_like") or name.startswith("new_")
    read = [] if shapes_alone else operation.read
    uses = [(t, False) for t in read] + [(t, True) for t in (*operation.written, *operation.made)]
    on_device = [tensor for tensor, _ in uses if paper.is_on_device(tensor)]
    if not on_device:
        paper.use(here, record.tick(here), name, uses)
        return
    crosses = len(on_device) < len(uses)
    actor = paper.stream.name
    paper.launched(actor)
    number = record.tick(actor)
    if name in COPIES or not crosses:
        paper.use(actor, number, name, uses)
    else:
        of_host = [(t, writes) for t, writes in uses if not paper.is_on_device(t)]
        paper.use(actor, number, name, [(t, writes) for t, writes in uses if paper.is_on_device(t)])
        paper.use(here, record.tick(here), name, of_host)
        large = [t for t, _ in of_host if t.dim()]
        if large and name not in INDEXED:
            record.complain(
                "operation on tensors of the device and of the host",
                name,
                f"{name} at {site()}",
                f"of the host: {[tuple(t.shape) for t in large]}",
                "all on one device",
            )
    if _synchronises(name, args, kwargs, crosses):
        paper.count(name)
        paper.join_host(record.snapshot(actor))


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _makes_on_device(paper: "Paper", inputs: list[Tensor], made: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether the new tensors of an operation lie on the device."""
    if paper.wanted:
        return paper.wanted == "device"
    device = kwargs.get("device")
    if device == INSIDE and device.index is not None:
        return True
    # Without inputs, autograd's own formulas name the CPU by the options of a gradient; a scalar is a number's.
    return any(map(paper.is_on_device, inputs)) if inputs else device is not None and any(t.dim() for t in made)


def _synchronises(name: str, args: Any, kwargs: dict[str, Any], crosses: bool) -> bool:
    """Whether the host waits until the operation is over."""
    if name in SYNCHRONISING:
        return True
    if name in INDEXED:
        indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
        return crosses or any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
    if name not in COPIES or not crosses:
        return False
    at_once = kwargs.get("non_blocking") or (name != "_to_copy" and len(args) > 2 and args[2])
    return not at_once
