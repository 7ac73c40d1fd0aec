"""The origins of values: modules whose outputs later layers read beside the activation, found in one forward.

[Note: values beside the activation] A stage skips the modules of earlier stages, but their outputs besides the
activation (masks, ids, lengths) may be read later: by a block, by the code around the blocks, or by the loss. Such a
value has no gradient; else the model is no chain. The probe follows every value through the operations of one forward,
by its storage: a *source* is one value that a module returned, and it goes to the layers that read it, or a result
of it without a gradient. A value read by Python (`item`, a condition, a loop over a list), or from which the shape of a
result follows (a mask as an index), can be used anywhere, so its sources go to all later layers.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INTO_PYTHON = ("tolist", "numpy", "__array__", "__dlpack__")  # not seen by the dispatcher
MASKED = (torch.ops.aten.index, torch.ops.aten.masked_select)  # a mask among their arguments decides the shape
SHAPES_ONLY = ("_like", "new_")  # names of operators that read only the shape
METADATA = "prim"  # the namespace of questions about the device or layout of a tensor without values


class ReturnedValue(NamedTuple):
    """One leaf of a module's output: the module's name, the number of its call in a forward, and the leaf's index."""

    path: str
    call: int
    leaf: int


class Aside(NamedTuple):
    """A tensor that a module made but did not return, and another layer read: the module, and both layers."""

    path: str
    made: int
    read: int


class _Call:
    """A running gated module: its layer, the storages of results of its arguments, and whether it reads values."""

    def __init__(self, path: str, layer: int, taken: set[int], has_parameters: bool) -> None:
        self.path, self.layer, self.data = path, layer, taken
        self.arguments, self.has_parameters = set(taken), has_parameters
        self.reads_values = False


class Origins(TorchDispatchMode):
    """Follows values through one forward; entered around it.

    Attributes:
        reads: by source, the layers that read it; infinite if Python read it.
        layer_of: by source, the layer of its module.
        alike: sources of one tensor, with the tensor.
        asides: tensors that reached other layers without being returned.
        leaves: by module and call, the number of returned values.
        phase: number of blocks that have run, the layer of the code around them.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: defaultdict[ReturnedValue, set[float]] = defaultdict(set)
        self.layer_of: dict[ReturnedValue, int] = {}
        self.alike: list[tuple[Tensor, list[ReturnedValue]]] = []
        self.asides: set[Aside] = set()
        self.leaves: dict[tuple[str, int], int] = {}
        self.phase = 0
        self._marks: dict[int, set[ReturnedValue]] = {}  # by storage
        self._made: dict[int, _Call] = {}  # storages of what modules made from their arguments
        self._alive: list[StorageWeakRef] = []  # so that no address is reused
        self._call: _Call | None = None
        self._paused = False
        self._python = _IntoPython(self._value_read)

    def __enter__(self) -> "Origins":
        """Start to follow."""
        self._python.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop following."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._python.__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow nothing inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def running(self) -> str | None:
        """The name of the gated module that runs and is followed."""
        return None if self._call is None or self._paused else self._call.path

    @contextmanager
    def call(self, path: str, layer: int, args: Any, has_parameters: bool) -> Iterator[_Call | None]:
        """Follow a gated module's call; None inside of another's, which includes it."""
        if self._call is not None:
            yield None
            return
        call = self._call = _Call(path, layer, set(map(storage_of, tensors_among(tree_leaves(args)))), has_parameters)
        try:
            yield call
        finally:
            self._call = None

    def returned(self, call: _Call, number: int, leaves: Sequence[Any], learned: bool) -> None:
        """Enter a module's output as sources, unless every stage runs it (not `learned`)."""
        if not learned:
            self._made = {key: made for key, made in self._made.items() if made is not call}
            return
        self.leaves[call.path, number] = len(leaves)
        shared = set(call.arguments)  # storages whose marks stay: a module may return views of one tensor
        for n, leaf in enumerate(leaves):
            source = ReturnedValue(call.path, number, n)
            self.layer_of[source] = call.layer
            if isinstance(leaf, Tensor):
                key = storage_of(leaf)
                kept = self._marks.get(key, set()) if key in shared else set()
                shared.add(key)
                self._mark(leaf, kept | {source})
                self._made.pop(key, None)
                self._group(leaf, source)
            elif isinstance(leaf, (bool, int, float)) and call.reads_values:
                self.reads[source].add(math.inf)

    def inner(self, path: str, number: int, leaves: Sequence[Any]) -> None:
        """Enter learned results of a module inside of a running one as sources, since hooks may take them out."""
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad and self._call is not None:
                source = ReturnedValue(path, number, n)
                self.layer_of[source] = self._call.layer
                self._mark(leaf, {source})

    def leave(self, leaves: Iterable[Any]) -> None:
        """Note that the model's output is read."""
        for leaf in tensors_among(leaves):
            self._read(leaf, self.phase)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note its reads and results."""
        output = func(*args, **(kwargs or {}))
        if self._paused or not reads_values(func):
            return output
        taken = list(tensors_among((args, kwargs)))
        for tensor in _asked(func, taken):
            self._value_read(tensor)
        sources: set[ReturnedValue] = set()
        data = False
        for tensor in taken:
            sources |= self._read(tensor, self._layer)
            data |= self._call is not None and storage_of(tensor) in self._call.data
        for tensor in tensors_among(output):
            if sources:
                self._mark(tensor, self._marks.get(storage_of(tensor), set()) | sources)
            if data and self._call is not None:
                self._hold(tensor)
                self._call.data.add(storage_of(tensor))
                if self._call.has_parameters and storage_of(tensor) not in self._call.arguments:
                    self._made[storage_of(tensor)] = self._call
        return output

    @property
    def _layer(self) -> int:
        return self.phase if self._call is None else self._call.layer

    def _read(self, tensor: Tensor, layer: float) -> set[ReturnedValue]:
        """Note that a layer reads a tensor; returns its sources."""
        key = storage_of(tensor)
        sources = self._marks.get(key, set())
        if tensor.requires_grad and torch.is_grad_enabled() and layer < math.inf:
            return sources  # autograd shows what this is made with
        for source in sources:
            self.reads[source].add(layer)
        made = self._made.get(key)
        if made is not None and made is not self._call and made.layer != self._layer:
            self.asides.add(Aside(made.path, made.layer, self._layer))
        return sources

    def _value_read(self, tensor: Tensor) -> None:
        if self._paused:
            return
        if self._call is None:
            self._read(tensor, math.inf)
            return
        self._call.reads_values = True
        self._read(tensor, self._call.layer if self._call.has_parameters else math.inf)

    def _group(self, leaf: Tensor, source: ReturnedValue) -> None:
        for tensor, group in self.alike:
            if tensor is leaf:
                group.append(source)
                return
        if not leaf.requires_grad:
            self.alike.append((leaf, [source]))

    def _mark(self, tensor: Tensor, sources: set[ReturnedValue]) -> None:
        self._hold(tensor)
        self._marks[storage_of(tensor)] = sources

    def _hold(self, tensor: Tensor) -> None:
        self._alive.append(StorageWeakRef(tensor.untyped_storage()))


class _IntoPython(TorchFunctionMode):
    """A mode for reads that bypass the dispatcher."""

    def __init__(self, read: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the tensor that a function converts to Python."""
        if getattr(func, "__name__", "") in INTO_PYTHON and args and isinstance(args[0], Tensor):
            self._read(args[0])
        return func(*args, **(kwargs or {}))


def tensors_among(tree: Any) -> Iterator[Tensor]:
    """The tensors in the arguments or the result of an operator: a walk in a fifth of the time of torch's pytrees."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_among(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_among(value)


def _asked(func: Any, taken: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors whose values Python gets from an operator, or whose values decide the shape of its result."""
    tags = getattr(func, "tags", ())
    if torch.Tag.data_dependent_output in tags:
        return taken
    if torch.Tag.dynamic_output_shape not in tags:
        return ()
    if func.overloadpacket in MASKED:
        return [tensor for tensor in taken[1:] if tensor.dtype in (torch.bool, torch.uint8)]
    return taken[:1]


def reads_values(func: Any) -> bool:
    """Whether an operator reads more of its arguments than shape, dtype and device."""
    return func.namespace != METADATA and not any(part in func.__name__ for part in SHAPES_ONLY)


def storage_of(tensor: Tensor) -> int:
    """A number of a tensor's memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse, or another layout without one
        return id(tensor)
