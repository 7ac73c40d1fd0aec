"""A device of paper: streams, events and memory that only exist in a record, while operations run on the CPU.

`Paper` replaces the one function through which zeroshard reaches a device, the factories and moves of torch, the
collectives and the threads. A tensor on the device is a tensor of the CPU whose storage is known as one of the device:
`Tensor.device` says so, and the operations on it are noted on the stream that is current in their thread. Where C++
makes tensors, the index of a CPU carries the place: "cpu:0" is the device of paper, "cpu" the host.
"""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from paper import collectives, threads
from paper.operations import INSIDE, Noting
from paper.record import Access, Block, Clock, Record, site
from torch import Tensor

from zeroshard.comm.hang_detector import DeviceDetector
from zeroshard.memory.disk import Disk
from zeroshard.memory.host import HostMemory
from zeroshard.memory.ledger import Arena, Category, Ledger
from zeroshard.optim.host import states
from zeroshard.platform import accelerator, transport

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
MAIN = "main stream"
LAST = 30.0  # seconds that threads may take at the end
FACTORIES = ("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
             "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "as_tensor", "zeros", "tril_indices",
             "triu_indices")  # fmt: skip
LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new_empty_strided")
KERNELS = ("optim/host/", "saved/codes/", "kernels/", "memory/disk.py", "rng/")  # what reads memory by its address


class Event:
    """An event of a stream; the device is so slow that it is over only when a wait proves it."""

    def __init__(self, paper: "Paper", enable_timing: bool = False) -> None:
        self._paper, self._clock = paper, Clock()

    def record(self, stream: "Stream | None" = None) -> None:
        """Cover all operations of the stream so far."""
        self._clock = self._paper.launched((stream or self._paper.stream).name)

    def wait(self, stream: "Stream | None" = None) -> None:
        """Make a stream wait."""
        (stream or self._paper.stream).wait_event(self)

    def synchronize(self) -> None:
        """Make this thread wait."""
        self._paper.count("event.synchronize")
        self._paper.join_host(self._clock)

    def query(self) -> bool:
        """Whether it is known to be over."""
        own = self._paper.record.clock(threads.here())
        return all(own.get(actor, 0) >= number for actor, number in self._clock.items())

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        return 1.0

    @property
    def clock(self) -> Clock:
        """What is over when it is."""
        return self._clock


class Stream:
    """A stream of the device."""

    device: ClassVar[torch.device] = DEVICE

    def __init__(self, paper: "Paper", name: str) -> None:
        self._paper, self.name = paper, name

    def wait_event(self, event: Event) -> None:
        """Start later operations after the event."""
        self._paper.launched(self.name)
        self._paper.record.join(self.name, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        """Start later operations after those of another stream so far."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """An event after all operations so far."""
        made = event or Event(self._paper)
        made.record(self)
        return made

    def synchronize(self) -> None:
        """Make this thread wait for all operations so far."""
        self._paper.count("stream.synchronize")
        self._paper.join_host(self._paper.launched(self.name))

    def query(self) -> bool:
        """Whether all operations so far are known to be over."""
        return self.record_event().query()


class Paper:
    """The device of one rank, from `with` to its end.

    Args:
        at_once: collectives, but for messages, have their values as soon as they are launched.

    Attributes:
        record: what happened.
        threads: that were started; they must end before it does.
        launchers: of each communicator's last operation, the thread, the launch's number, and its text.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.record, self.at_once = Record(), at_once
        self.threads: list[threading.Thread] = []
        self.launchers: dict[str, tuple[str, int, str]] = {}
        self._blocks: dict[int, Block] = {}  # by storage
        self._references: dict[int, weakref.ref[Any]] = {}
        self._registered: dict[int, int] = {}  # bytes by address
        self._left: list[Block] = []  # registered memory without a tensor
        self._local = threading.local()
        self._streams = 0
        self._main = Stream(self, MAIN)
        self._stack = contextlib.ExitStack()

    @property
    def stream(self) -> Stream:
        """The current stream of this thread."""
        found: Stream = getattr(self._local, "stream", self._main)
        return found

    def __enter__(self) -> "Paper":
        stack = self._stack
        for target, name, made in [*self._replaced(), *threads.replaced(self), *collectives.replaced(self)]:
            stack.enter_context(patch.object(target, name, made))
        stack.enter_context(self.watching())
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        gc.collect()
        try:
            for thread in self.threads:
                thread.join(LAST if kind is None else 0)
                ended = kind is not None or self.record.findings or not thread.is_alive()
                assert ended, f"{thread.name} goes on: drop its engine first"
        finally:
            self._stack.close()
            self._references.clear()

    def watching(self) -> Noting:
        """The mode in which this thread's operations are noted."""
        return Noting(self)

    # What the streams and events do

    def launched(self, actor: str) -> Clock:
        """A copy of the clock of an actor to which this thread launches something."""
        with self.record.lock:
            self.record.join(actor, self.record.clock(threads.here()))
            return self.record.snapshot(actor)

    def join_host(self, clock: Clock) -> None:
        """This thread has waited for all that the clock covers."""
        with self.record.lock:
            self.record.join(threads.here(), clock)

    def count(self, name: str) -> None:
        """Count a wait of the main thread for the device; threads beside it may wait."""
        if threading.current_thread() is threading.main_thread():
            self.record.synchronisations[str(site()), name] += 1

    def synchronize(self, device: object = None) -> None:
        """Wait for all streams."""
        self.count("synchronize")
        with self.record.lock:
            for actor in [actor for actor in self.record.clocks if not actor.startswith("thread")]:
                self.join_host(self.launched(actor))

    @contextlib.contextmanager
    def inside(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one of this thread."""
        before, self._local.stream = self.stream, stream
        try:
            yield
        finally:
            self._local.stream = before

    # Memory

    def block(self, tensor: Tensor) -> Block:
        """The block of a tensor's storage; memory of the host, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._blocks.get(key)
        if found is None:
            meta = storage.device.type == "meta"
            address = 0 if meta or not storage.nbytes() else storage.data_ptr()
            found = self._blocks[key] = Block(storage.nbytes(), address)
            if any(start <= address < start + nbytes for start, nbytes in self._registered.items()):
                found.locked = "registered"
            self._references[key] = weakref.ref(storage, partial(_freed, weakref.ref(self), key))
        return found

    def freed(self, key: int) -> None:
        """A storage is gone."""
        with self.record.lock:
            self._references.pop(key, None)
            block = self._blocks.pop(key, None)
            if block is not None and block.locked == "registered":
                self._left.append(block)  # the memory lives until it is unregistered
            elif block is not None:
                self.record.released(block, threads.here())

    def put_on_device(self, tensor: Tensor) -> None:
        """Know a new tensor as one of the device, allocated for the current stream."""
        block = self.block(tensor)
        block.on_device, block.stream = True, self.stream.name

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return tensor.layout is torch.strided and self.block(tensor).on_device

    def name(self, tensor: Tensor, label: str) -> None:
        """Name a tensor in findings."""
        if tensor.numel():
            self.block(tensor).label = label

    def use(self, actor: str, number: int, name: str, tensors: list[tuple[Tensor, bool]]) -> None:
        """Note that an operation reads, or writes, these tensors."""
        at = site()
        for tensor, writes in tensors:
            if tensor.numel() == 0 or tensor.layout is not torch.strided:
                continue
            low = tensor.storage_offset() * tensor.itemsize
            extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            block = self.block(tensor)
            block.label = block.label or f"the tensor of {name} at {at}"
            high = low + extent * tensor.itemsize
            access = Access(actor, number, name, at, low, high, writes)
            if name == "copy_" and writes and block.locked and not actor.startswith("thread"):
                self.record.copies[actor, number] = block, access
            self.record.access(block, access)

    def touch(self, tensor: Tensor, name: str, writes: bool = False) -> None:
        """The host reads or writes a tensor's memory now."""
        if self.is_on_device(tensor) or tensor.untyped_storage().device.type == "meta":
            return
        with self.record.lock:
            actor = threads.here()
            self.use(actor, self.record.tick(actor), name, [(tensor, writes)])

    # The replaced functions

    def _replaced(self) -> list[tuple[Any, str, Any]]:
        module = SimpleNamespace(
            Event=partial(Event, self),
            Stream=self._new_stream,
            current_stream=lambda device=None: self.stream,
            stream=self.inside,
            synchronize=self.synchronize,
            set_device=lambda device: None,
            get_rng_state=lambda device=None: torch.get_rng_state(),
            set_rng_state=lambda state, device=None: None,
            cudart=lambda: SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister),
            get_device_properties=lambda device: SimpleNamespace(total_memory=2**40),
            set_per_process_memory_fraction=lambda share, device: None,
            max_memory_allocated=lambda device=None: 0,
            memory_reserved=lambda device=None: 0,
            mem_get_info=lambda device=None: (2**40, 2**40),
            empty_cache=lambda: None,
            get_device_name=lambda device=None: "a device of paper",
        )
        found: list[tuple[Any, str, Any]] = [
            (accelerator, "_ask", lambda device, name, error=None: getattr(module, name)),
            (accelerator, "forked_random", lambda devices: torch.random.fork_rng([])),
            (
                DeviceDetector,
                "follow",
                lambda detector, place: None,
            ),  # events end only by waits
            (transport, "_is_closed_to", lambda group, tensor: False),  # messages are NCCL's
            (torch, "Generator", _Generator),
            (states, "map_on", cache(states.map_on.__wrapped__)),  # else tensors of an earlier device of paper
            (Ledger, "empty", self._naming(Ledger.empty, 4)),
            (HostMemory, "slab", self._naming(HostMemory.slab, 3)),
            (Arena, "take", self._naming(Arena.take, 2, "scratch for ")),
            (torch.UntypedStorage, "resize_", self._resizing()),
            (Tensor, "record_stream", lambda tensor, stream: self.block(tensor).shared.add(stream.name)),
            (Tensor, "device", property(self._device_of)),
            (Tensor, "is_cuda", property(lambda tensor: self._device_of(tensor).type == "cuda")),
            (Tensor, "is_cpu", property(lambda tensor: self._device_of(tensor).type == "cpu")),
            (Tensor, "cpu", lambda tensor, **kw: self._moved(tensor, HOST, kw)),
            (Tensor, "cuda", lambda tensor, *args, **kw: self._moved(tensor, DEVICE, kw)),
            (Tensor, "to", self._to()),
            (Tensor, "numpy", self._touching(Tensor.numpy)),
            (Disk, "read", self._filling(Disk.read)),
            (Tensor, "tolist", self._to_list()),
            (Tensor, "data_ptr", self._pointer()),
        ]
        found += [(torch, name, self._factory(getattr(torch, name), False)) for name in FACTORIES]
        found += [(torch, name, self._factory(getattr(torch, name), True)) for name in LIKE]
        found += [(Tensor, name, self._factory(getattr(Tensor, name), True)) for name in NEW]
        return found

    def _new_stream(self, device: object = None) -> Stream:
        self._streams += 1
        return Stream(self, f"stream {self._streams}")

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        with self.record.lock:
            self._registered[address] = nbytes
            for block in self._blocks.values():
                if address <= block.address < address + nbytes:
                    block.locked = "registered"
        return 0

    def _unregister(self, address: int) -> None:
        with self.record.lock:
            nbytes = self._registered.pop(address)
            for block in [*self._blocks.values(), *self._left]:
                if not block.on_device and address <= block.address < address + nbytes:
                    self.record.released(block, threads.here(), "unregistration")
            self._left = [block for block in self._left if block.address in self._registered]

    def _naming(self, function: Callable[..., Tensor], at: int, prefix: str = "") -> Callable[..., Tensor]:
        """A maker of buffers, whose argument number `at` (or `label`) names them."""

        @wraps(function)
        def made(maker: Any, *args: Any, **kw: Any) -> Tensor:
            tensor = function(maker, *args, **kw)
            category = next((str(a) for a in (*args, *kw.values()) if type(a).__name__ == "Category"), "")
            label = kw.get("label") or args[at if len(args) > at else -1]
            self.name(tensor, f"{prefix}{label}{category and f' ({category})'}")
            return tensor

        return made

    def _resizing(self) -> Callable[..., Any]:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            block = self._blocks.get(storage._cdata)
            with self.record.lock:
                if block is not None and nbytes == 0:
                    self.record.released(block, threads.here(), "resize to nothing")
                elif block is not None and block.on_device:
                    block.stream, block.shared = self.stream.name, set()
            return resize(storage, nbytes)

        return resized

    def _device_of(self, tensor: Tensor) -> torch.device:
        plain: torch.device = torch._C.TensorBase.device.__get__(tensor)  # type: ignore[attr-defined]
        as_it_is = plain.type != "cpu" or getattr(self._local, "plain", False)
        return DEVICE if not as_it_is and self.is_on_device(tensor) else plain

    def _moved(self, tensor: Tensor, target: torch.device, kw: dict[str, Any]) -> Tensor:
        plain: torch.device = torch._C.TensorBase.device.__get__(tensor)  # type: ignore[attr-defined]
        to = torch._C.TensorBase.to
        if target.type == "meta" or plain.type == "meta":
            return to(tensor, target, **kw)
        if (target.type != "cpu") == self.is_on_device(tensor):
            return to(tensor, **kw) if kw.keys() & {"dtype", "copy", "memory_format"} else tensor
        with self.wanting("host" if target.type == "cpu" else "device"):
            return to(tensor, INSIDE, **{**kw, "copy": True})

    def _to(self) -> Callable[..., Tensor]:
        to = torch._C.TensorBase.to

        def moved(tensor: Tensor, *args: Any, **kw: Any) -> Tensor:
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **_without_copy(kw))
            like = next((a for a in (*args, *kw.values()) if isinstance(a, Tensor)), None)
            if like is not None:
                device = self._device_of(like)
            if device is None:
                return to(tensor, *args, **kw)
            words = {"dtype": dtype, "memory_format": memory_format, "copy": kw.get("copy") or None}
            given = {name: value for name, value in words.items() if value is not None}
            return self._moved(tensor, device, {**given, "non_blocking": non_blocking})

        return moved

    def _filling(self, read: Callable[..., None]) -> Callable[..., None]:
        def filled(disk: Disk, extent: Any, into: Tensor) -> None:
            self.touch(into, "a read of the disk", True)
            read(disk, extent, into)

        return filled

    def _touching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def touched(tensor: Tensor, *args: Any, **kw: Any) -> Any:
            if self.is_on_device(tensor):
                raise TypeError("can't convert a tensor of the device of paper to numpy; use Tensor.cpu() first")
            self.touch(tensor, function.__name__)
            return function(tensor, *args, **kw)

        return touched

    def _to_list(self) -> Callable[..., Any]:
        def listed(tensor: Tensor) -> Any:
            host = tensor.detach().cpu() if self.is_on_device(tensor) else tensor
            self.touch(host, "tolist")
            return torch._C.TensorBase.tolist(host)  # type: ignore[attr-defined]

        return listed

    def _pointer(self) -> Callable[..., int]:
        def pointer(tensor: Tensor) -> int:
            if any(part in site().file for part in KERNELS):  # which write all but gradients
                self.touch(tensor, "a kernel", str(Category.GRADIENTS) not in self.block(tensor).label)
            return torch._C.TensorBase.data_ptr(tensor)

        return pointer

    def _factory(self, function: Callable[..., Any], like: bool) -> Callable[..., Any]:
        """A maker of tensors with the device in its words; `like` others, it has theirs by default."""

        @wraps(function)
        def made(*args: Any, **kw: Any) -> Any:
            device = kw.get("device")
            pinned = kw.pop("pin_memory", False)
            wanted = torch.device(device).type if isinstance(device, (str, torch.device)) else None
            if wanted == "meta":
                return function(*args, **kw)
            if wanted == "cuda":
                with self.wanting("device"):
                    return function(*args, **{**kw, "device": INSIDE})
            if like and wanted is None:
                return function(*args, **kw)
            with self.wanting("host"):
                tensor = function(*args, **kw)
            if pinned:
                self.block(tensor).locked = "pool"
            return tensor

        return made

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Tensors are those of the CPU inside."""
        self._local.plain = True
        try:
            yield
        finally:
            self._local.plain = False

    @contextlib.contextmanager
    def wanting(self, place: str) -> Iterator[None]:
        """Tensors that are made inside lie there."""
        before, self._local.wanted = self.wanted, place
        try:
            yield
        finally:
            self._local.wanted = before

    @property
    def wanted(self) -> str:
        """Where this thread's next new tensor lies: "host", "device", or "" for the place of its operation."""
        found: str = getattr(self._local, "wanted", "")
        return found


def _freed(paper: "weakref.ref[Paper]", key: int, reference: object) -> None:
    alive = paper()
    if alive is not None:
        alive.freed(key)


def _without_copy(kw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kw.items() if name != "copy"}


_HOST_GENERATOR = torch.Generator


class _Generator(torch.Generator):
    """Random numbers of the device are the CPU's."""

    def __new__(cls, device: object = "cpu") -> Any:
        return _HOST_GENERATOR(device="cpu")
