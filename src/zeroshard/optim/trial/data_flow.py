"""Data flow of an optimizer's step: the parameters whose data reach each tensor.

[Note: data flow] A trial with numbers tests only these numbers: clipping by a norm over all parameters, say, changes
nothing below its threshold. So trial steps are also watched. Each memory of a tensor has an origin: the parameters
whose values or gradients flowed into it, and whether each element has only data of the same place. A pointwise
operation keeps places, all others (sums, norms, products of matrices, transpositions, operations outside of torch) mix
them. At the end of a step each parameter and its states must have data of that parameter alone, and of equal places if
the optimizer is to run on slices. Values that Python reads (`item`, `if tensor:`, numpy) leave the flow, so they count
as mixed, and `dependence` disturbs one parameter to test whether others change.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = frozenset(("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"))
LEAVES = frozenset(  # by which values are read and written without an operation
    ("numpy", "tolist", "__array__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__")
)
SHAPES = frozenset(("shape", "ndim", "size", "dim", "numel", "nelement", "__len__", "stride", "nbytes", "T", "mT"))
PLACED = frozenset(  # pointwise without torch's tag
    ("_to_copy", "copy_", "zero_", "fill_", "masked_fill_", "masked_fill", "where", "detach", "lift_fresh", "alias")
)
EVEN = frozenset(  # factories of tensors with equal elements
    f"{prefix}{name}{suffix}"
    for name in ("zeros", "ones", "full", "empty", "empty_strided", "scalar_tensor")
    for prefix in ("", "new_")
    for suffix in ("", "_like")
)
LISTS = ("_foreach_", "_fused_")  # operations on each tensor of lists
MIXING_LISTS = frozenset(("_foreach_norm", "_foreach_max", "_foreach_powsum"))


@dataclass(frozen=True, slots=True)
class DataOrigin:
    """The parameters, by number, whose data are in a tensor; `mixed` unless each element has data of its place only."""

    parameters: frozenset[int] = frozenset()
    mixed: bool = False


NONE = DataOrigin()


class DataFlow(TorchDispatchMode):
    """Follows data through the operations inside ([Note: data flow]).

    Attributes:
        read: parameters with data that Python has read.
        together: whether one read had data of several parameters.
        random: whether an operation drew random numbers.
        shapes: whether Python read the shape of a tensor.
        used: parameters with data in any operation or read.
        written: the memories that operations have changed.
        program: the operations in order, with their numbers, if they are kept.
    """

    def __init__(self, keep: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[int] = set()
        self.used: set[int] = set()
        self.written: set[int] = set()
        self.together = self.random = self.shapes = False
        self.program: list[Any] | None = [] if keep else None
        self._origins: dict[int, DataOrigin] = {}
        self._packed: dict[int, list[DataOrigin]] = {}  # of each element of a stack or concatenation
        self._alive: list[torch.UntypedStorage] = []  # so that no other memory gets a known address
        self._calls = _Calls(self)

    def __enter__(self) -> "DataFlow":
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*error)  # type: ignore[no-untyped-call]

    def give(self, tensor: Tensor, number: int) -> None:
        """Mark a tensor as data of a parameter."""
        self._set(tensor, DataOrigin(frozenset((number,))))

    def origin(self, tensor: Tensor) -> DataOrigin:
        """The origin of a tensor's memory."""
        return _joined(self._each(tensor)) if memory_of(tensor) in self._packed else self._origin(tensor)

    def left(self, tensors: Iterable[Tensor]) -> None:
        """Note a read by Python outside of operations."""
        self._note(self.origin(tensor) for tensor in tensors)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self._follow(func, args, kwargs or {}, result)
        return result

    def _follow(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if self.program is not None:
            numbers = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) in (float, bool)]
            self.program.append((str(func), numbers))
        if name in READS:
            self._note(map(self.origin, _tensors((args, kwargs))))
            return
        arguments = func._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | {**kwargs}
        changed = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
        written = [given[key] for key in changed if given.get(key) is not None]
        if func.is_view:
            return
        self.written.update(map(memory_of, _tensors(written)))
        if name.startswith(LISTS) and func.namespace == "aten":
            self._follow_lists(name, [*given.values()], written, result)
            return
        keeps = func.namespace == "aten" and (_pointwise(func, name) or _masks(name, args))
        inputs = _tensors([*given.values()])
        outputs = _tensors([*written, result])
        if not inputs and not keeps and name not in EVEN:
            for tensor in outputs:  # values by place, such as a range
                self._set(tensor, DataOrigin(mixed=tensor.numel() > 1))
        elif name in ("stack", "cat") and given.get("dim", 0) == 0 and all(map(Tensor.is_contiguous, inputs)):
            self._set(result, DataOrigin(mixed=True))
            self._packed[memory_of(result)] = [each for tensor in inputs for each in self._each(tensor)]
        elif name not in EVEN:
            self._flow(keeps, inputs, outputs)
        else:
            for tensor in outputs:
                self._set(tensor, NONE)

    def _follow_lists(self, name: str, given: Sequence[Any], written: Sequence[Any], result: Any) -> None:
        """Follow an operation on lists of tensors, one tensor after the other."""
        lists = [each for each in given if isinstance(each, (list, tuple)) and _tensors(each)]
        alone = [each for each in given if isinstance(each, Tensor)]
        results = result if isinstance(result, (list, tuple)) else ()
        for number in range(max(map(len, lists), default=0)):
            outputs = [each[number] for each in (*written, results) if isinstance(each, (list, tuple)) and each]
            inputs = [each[number] for each in lists if number < len(each)]
            self._flow(name not in MIXING_LISTS, _tensors(inputs) + alone, _tensors(outputs))

    def _flow(self, keeps: bool, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Set the outputs' origins from the inputs'; the operation keeps places or mixes them."""
        if keeps and any(memory_of(tensor) in self._packed for tensor in inputs) and self._flow_packed(inputs, outputs):
            return
        origins = [(tensor, self.origin(tensor)) for tensor in inputs]
        found = frozenset().union(*(origin.parameters for _, origin in origins))
        self.used |= found
        for output in outputs:
            mixed = any(origin.mixed for _, origin in origins)
            if found:
                mixed |= not keeps or not all(
                    _is_whole(tensor) and tensor.numel() == output.numel()
                    for tensor, origin in origins if origin.parameters
                )  # fmt: skip
            before = self.origin(output)
            partly = not _is_whole(output)
            self._set(output, DataOrigin(found | (before.parameters if partly else frozenset()), mixed or partly))

    def _flow_packed(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
        """As `_flow` for each element; False if inputs and outputs differ in their numbers of elements."""
        size = max(tensor.numel() for tensor in inputs)
        if any(tensor.numel() not in (1, size) for tensor in inputs) or any(t.numel() != size for t in outputs):
            return False
        self.used.update(*(self.origin(tensor).parameters for tensor in inputs))
        each = [self._each(tensor) * (size // tensor.numel()) for tensor in inputs]
        for output in outputs:
            if not _is_whole(output):
                return False
            self._set(output, DataOrigin(mixed=True))
            self._packed[memory_of(output)] = [_joined(origins) for origins in zip(*each, strict=True)]
        return True

    def _each(self, tensor: Tensor) -> list[DataOrigin]:
        """The origins of the elements of a tensor."""
        packed = self._packed.get(memory_of(tensor))
        if packed is None:
            return [DataOrigin(self._origin(tensor).parameters, mixed=True)] * tensor.numel()
        if tensor.numel() > 1 and not tensor.is_contiguous():
            return [_joined(packed)] * tensor.numel()
        return packed[tensor.storage_offset() : tensor.storage_offset() + tensor.numel()]

    def _origin(self, tensor: Tensor) -> DataOrigin:
        return self._origins.get(memory_of(tensor), NONE)

    def _set(self, tensor: Tensor, origin: DataOrigin) -> None:
        memory = memory_of(tensor)
        self._packed.pop(memory, None)
        if memory not in self._origins:
            self._alive.append(tensor.untyped_storage())
        self._origins[memory] = origin

    def _note(self, origins: Iterable[DataOrigin]) -> None:
        known = [origin for origin in origins if origin.parameters]
        found = set().union(*(origin.parameters for origin in known))
        self.read |= found
        self.used |= found
        self.together |= len(found) > 1


class _Calls(TorchFunctionMode):
    """Enters calls outside of operations into a data flow."""

    def __init__(self, flow: DataFlow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if name in LEAVES:
            with torch._C.DisableTorchFunction():
                self._flow.left(_tensors(args))
        self._flow.shapes |= name in SHAPES
        return func(*args, **(kwargs or {}))


def _joined(origins: Iterable[DataOrigin]) -> DataOrigin:
    every = list(origins)
    return DataOrigin(frozenset().union(*(each.parameters for each in every)), any(each.mixed for each in every))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@cache
def _pointwise(func: OpOverload, name: str) -> bool:
    """Whether an operation is pointwise, by torch's tag on it or, as some in-place ones lack it, on another form."""
    other = getattr(torch.ops.aten, name.removesuffix("_"), None)
    every = [func, *(getattr(other, overload) for overload in (other.overloads() if other is not None else ()))]
    return name in PLACED or any(torch.Tag.pointwise in each.tags for each in every)


def _masks(name: str, args: Sequence[Any]) -> bool:
    """Whether an operation writes one number by a mask of the same shape (`p[p < 0] = 0`)."""
    if "index_put" not in name or len(args) < 3 or len(args[1]) != 1:
        return False
    (mask,) = args[1]
    return mask is not None and mask.dtype == torch.bool and mask.shape == args[0].shape and args[2].numel() == 1


def memory_of(tensor: Tensor) -> int:
    """A key of a tensor's memory, valid while it lives."""
    return int(tensor.untyped_storage()._cdata)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory, in the order of its elements."""
    whole = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
    return whole and tensor.is_contiguous()
