"""The tracker: every byte of every tensor that is alive, and the cost of every operation, while an engine runs.

It works under autograd, so it also sees allocations of backwards and optimizers. It looks once per operation and
storage (torch's own `MemTracker` walks all modules each time); a storage is struck out when Python frees it.

[Note: tensors on the host] Tensors from `make_on_host` do not count, nor do results of operations on them alone, single
numbers aside: on a GPU an optimizer's states and temporaries are where its parameters are.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroshard.planner.predict.torch_internals import (
    ANSWERS,
    DEVICE,
    IN_PLACE,
    SPECIAL,
    STAND_INS,
    DispatchMode,
    Packet,
    Results,
    adds_bias,
    device_of,
    flops_of,
    is_in_place,
    is_view,
    node_now,
    only_owner,
)


@dataclass(slots=True)
class MemoryPeak:
    """The peak of memory.

    Attributes:
        nbytes: sum over all storages.
        snapshot: from `Tracker.note` at that moment.
    """

    nbytes: int = 0
    snapshot: dict[str, int] = field(default_factory=dict)


Listener = Callable[[int, int, torch.dtype, bool], None]  # floating-point operations, bytes, dtype, whether on the host

Beside = Callable[[Packet, tuple[Any, ...], Any], int]


class Tracker(DispatchMode):
    """Counts storages and operations between entering and leaving it.

    Args:
        listener: called with the cost of each computing operation.
        answers: whether reads of values return True and 1, for tensors without values.
        rounds: granularity of storages, in bytes.
        results: remembers results of operations on tensors without values; by default every operation runs.
        beside: returns an operation's workspace bytes at its peak; 0 by default.

    Attributes:
        current: bytes alive now.
        peaks: by phase, so far.
        phase: called for the name of the present phase.
        off_device: whether a tensor's new storage is outside of the device.
        note: called for a snapshot at each new peak.
    """

    def __init__(
        self,
        listener: Listener | None = None,
        answers: bool = False,
        rounds: int = 1,
        results: Results | None = None,
        beside: Beside | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note: Callable[[], dict[str, int]] = dict
        self.phase: Callable[[], str] = str
        self.off_device: Callable[[torch.Tensor], bool] = lambda tensor: False
        self._listener, self._answers, self._rounds = listener, answers, rounds
        self._results, self._beside = results, beside
        self._list: Callable[[], None] | None = None
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage], int]] = {}  # last: the node that made it
        self._shared: dict[int, int] = {}  # number of ranks that share a storage; 0 off the device
        self._looks, self._has_host_tensors, self._makes_aside = True, False, False
        self.current = 0
        self.peaks: dict[str, MemoryPeak] = {}
        only_owner()  # as long as no operation is under way

    def __torch_dispatch__(
        self, func: Packet, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and record its results."""
        if func is DEVICE:
            return device_of(args[0])
        kwargs = kwargs or {}
        run = func
        if func in SPECIAL:
            if func in IN_PLACE:
                func = run = self._as_in_a_run(func, args, kwargs)
            elif self._answers and func in ANSWERS:
                return ANSWERS[func](*args)
            elif self._answers:
                run = STAND_INS[func]
        result = run(*args, **kwargs) if self._results is None else self._results.of(func, run, args, kwargs)
        if not self._looks:
            return result
        on_host = self._has_host_tensors and self._is_on_host(args, kwargs)
        if isinstance(result, torch.Tensor):
            self.see(result, on_host)
        elif result is not None:
            for one in _tensors_in((result,)):
                self.see(one, on_host)
        if self._beside is not None and (extra := self._beside(func, args, result)):
            self._add(extra)
            self._add(-extra)
        if self._listener is not None and not is_view(func):
            self._tell(func, args, kwargs, result, on_host)
        return result

    def see(self, tensor: torch.Tensor, on_host: bool = False) -> None:
        """Record a tensor's storage if it is new or was resized; a new one may be on the host."""
        if tensor.layout is not torch.strided or device_of(tensor).type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive and (on_host or self._makes_aside or self.off_device(tensor)):
            self._shared[key], self._has_host_tensors = 0, True
        ranks = self._shared.get(key, 1)
        nbytes = self._round(storage.nbytes() // ranks) if ranks else 0
        entry = self._alive.get(key)
        if entry is not None:
            if entry[0] != nbytes:
                self._alive[key] = (nbytes, *entry[1:])
                self._add(nbytes - entry[0])
            return
        self._alive[key] = (nbytes, weakref.ref(storage, lambda _: self._gone(key)), node_now())
        self._add(nbytes)

    def share(self, tensor: torch.Tensor, ranks: int) -> None:
        """Count one rank's fraction of a storage that `ranks` ranks share."""
        key = tensor.untyped_storage()._cdata
        self._shared[key] = ranks
        self.see(tensor)

    def make_on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor that is not on the device, and does not count ([Note: tensors on the host])."""
        self._looks = False
        try:
            tensor = torch.zeros(numel, dtype=dtype)
        finally:
            self._looks = True
        self._has_host_tensors = True
        self.see(tensor, on_host=True)
        return tensor

    @contextmanager
    def making_aside(self) -> Iterator[None]:
        """All tensors made inside are on the host, and do not count ([Note: tensors on the host])."""
        self._makes_aside = True
        try:
            yield
        finally:
            self._makes_aside = False

    def bring(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors of the host, which are on the device from now on."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            counted = self._shared.pop(key, None)
            if counted:
                self._shared[key] = counted
            elif counted is not None:
                self._alive.pop(key, None)
                self.see(tensor)

    @contextmanager
    def listing(self, call: Callable[[], None]) -> Iterator[None]:
        """Call `call` after every change, inside."""
        self._list = call
        try:
            yield
        finally:
            self._list = None

    @property
    def peak(self) -> MemoryPeak:
        """The highest peak of all phases."""
        return max(self.peaks.values(), key=lambda peak: peak.nbytes, default=MemoryPeak())

    def start_again(self) -> None:
        """Reset all peaks to the present memory."""
        self.peaks = {self.phase(): MemoryPeak(self.current, self.note())}

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Also record changes outside of operations: resized storages, and states of random numbers."""
        original, state_of = torch.UntypedStorage.resize_, torch.get_rng_state

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = original(storage, nbytes)
            entry = self._alive.get(storage._cdata)
            if entry is not None:
                self._alive[storage._cdata] = (self._round(nbytes), *entry[1:])
                self._add(self._round(nbytes) - entry[0])
            return result

        def random_state() -> torch.Tensor:
            state: torch.Tensor = state_of()
            self.see(state)
            return state

        torch.get_rng_state = torch.random.get_rng_state = random_state
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.get_rng_state = torch.random.get_rng_state = state_of
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def _as_in_a_run(self, func: Packet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Packet:
        """The operation that torch takes in a run, where there is no dispatch mode."""
        if adds_bias(func, args):
            self._gone(args[0].untyped_storage()._cdata)  # the result takes its place
            return func
        if not torch.is_grad_enabled() and args[0].layout is torch.strided:
            entry = self._alive.get(args[0].untyped_storage()._cdata)
            if is_in_place(func, args, kwargs, -1 if entry is None else entry[2]):
                return IN_PLACE[func]
        return func

    def _round(self, nbytes: int) -> int:
        return -(-nbytes // self._rounds) * self._rounds

    def _add(self, change: int) -> None:
        self.current += change
        if change > 0:
            phase = self.phase()
            highest = self.peaks.get(phase)
            if highest is None or self.current > highest.nbytes:
                self.peaks[phase] = MemoryPeak(self.current, self.note())
        if self._list is not None:
            self._list()

    def _gone(self, key: int) -> None:
        entry = self._alive.pop(key, None)
        self._shared.pop(key, None)
        if entry is not None:
            self.current -= entry[0]
            if self._list is not None:
                self._list()

    def _is_on_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the inputs of an operation are on the host, single numbers aside."""
        tensors = _tensors_in((*args, *kwargs.values()))
        marks = [self._shared.get(t.untyped_storage()._cdata, 1) == 0 for t in tensors if t.layout is torch.strided]
        large = [mark for mark, tensor in zip(marks, tensors, strict=False) if tensor.dim() or mark]
        return bool(large) and all(large)

    def _tell(self, func: Packet, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, on_host: bool) -> None:
        assert self._listener is not None
        tensors = _tensors_in((args, *kwargs.values(), result))
        if tensors:
            moved = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
            floating = next((t.dtype for t in tensors if t.is_floating_point()), tensors[0].dtype)
            self._listener(flops_of(func, args, kwargs, result), moved, floating, on_host)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, which lie in tuples and lists."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors_in(value)
    return found
