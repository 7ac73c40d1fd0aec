"""The device of a rank: streams, events, memory, random numbers, its collectives' backend; on CPUs, their substitutes.

A device is reached through torch's module for its type, by names that these modules share: `torch.cuda` for CUDA and
for ROCm, `torch.xpu`, or a module that an extension registers. A device whose module lacks a name is refused where that
name is needed. The CPU has no streams and no events, and its operations need no wait; each function has an answer for
it, so that callers need no check of the type of a device.

This module imports only errors from zeroshard, and no other module names a device's module.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed import get_default_backend_for_device

from zeroshard.errors import OffloadError, PlanError

HOSTS = ("cpu", "meta")  # types of devices without execution beside the host
TRAINING = ("Event", "Stream", "current_stream", "get_rng_state", "set_device", "set_rng_state", "stream",
            "synchronize")  # fmt: skip
_other_devices = ContextVar("other_devices", default=False)  # rehearsals run concurrently in threads
_limited: set[torch.device] = set()  # whose allocators were limited here
WAYS_OUT = {"cudart": "train without offload", "set_per_process_memory_fraction": "leave out device_memory"}
PORTABLE = 1  # cudaHostRegisterPortable: for all devices
BUILDS = (("CUDA", "cuda"), ("ROCm", "hip"), ("XPU", "xpu"))  # name for people; attribute of torch.version


def is_accelerator(device: torch.device) -> bool:
    """Whether the device has memory of its own, and runs operations while the host goes on."""
    return device.type not in HOSTS


@contextmanager
def as_on_devices() -> Iterator[None]:
    """Compute with tensors on CPUs as on other devices inside, in this thread, for a rehearsal of other devices."""
    token = _other_devices.set(True)
    try:
        yield
    finally:
        _other_devices.reset(token)


def on_cpus(tensor: torch.Tensor) -> bool:
    """Whether computations with a tensor take the ways that are best on CPUs."""
    return tensor.device.type == "cpu" and not _other_devices.get()


def built_for() -> str | None:
    """The kind of accelerator that torch is built for and its version, such as "CUDA 13.0"; None for CPUs alone."""
    versions = ((name, getattr(torch.version, attribute, None)) for name, attribute in BUILDS)
    return next((f"{name} {version}" for name, version in versions if version), None)


def kind() -> str:
    """The type of this machine's accelerator, by torch's name; "cpu" without one that zeroshard can use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and not _missing(found) else "cpu"


def count(name: str | None = None) -> int:
    """The number of visible devices of a type, by default of `kind()`; 0 for the CPU."""
    device = torch.device(name or kind())
    if not is_accelerator(device):
        return 0
    module = torch.get_device_module(device)
    return int(module.device_count()) if module.is_available() else 0


def pick(name: str | None = None, ranks: int = 1, number: int = 0) -> torch.device:
    """The device of a rank.

    Args:
        name: a type of device by torch's name; by default an accelerator where each rank can have one, else the CPU.
        ranks: number of ranks on this machine.
        number: of this rank among them.

    Raises:
        PlanError: torch has no such device, or too few, or lacks functions that training needs on them.
    """
    if name is None:
        name = kind() if count() >= ranks else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not _is_known(name):
        raise PlanError(
            f"Device {name!r} is unknown; use 'cpu' or 'cuda' (which is ROCm too), or the type of another accelerator "
            f"by torch's name."
        )
    if absent := _missing(torch.device(name)):
        raise PlanError(f"Device {name!r} cannot train: torch.{name} lacks {', '.join(absent)}; use device='cpu'.")
    found = count(name)
    if not found:
        raise PlanError(
            f"device={name!r} needs a GPU, and PyTorch sees none of that type (it was built without it, the driver is "
            f"missing, or a variable such as CUDA_VISIBLE_DEVICES hides it); use device='cpu', or leave the device out."
        )
    if found < ranks:
        raise PlanError(
            f"{ranks} local ranks ask for {name!r} and {found} GPUs are visible; start {found} ranks or use "
            f"device='cpu'."
        )
    return torch.device(name, number)


def select(device: torch.device) -> None:
    """Make this the default device of the process."""
    if is_accelerator(device):
        _ask(device, "set_device")(device)


def backend(device: torch.device) -> str:
    """The name of torch.distributed's backend for tensors on the device: gloo, nccl (for ROCm too), xccl.

    Raises:
        PlanError: torch has none.
    """
    try:
        return get_default_backend_for_device(device)
    except ValueError:
        raise PlanError(f"torch.distributed has no backend for {device.type!r}; use device='cpu'.") from None


def title(device: torch.device) -> str | None:
    """The accelerator's name, such as "NVIDIA A100-SXM4-80GB"; None on a CPU, which torch does not name."""
    return str(_ask(device, "get_device_name")(device)) if is_accelerator(device) else None


def synchronize(device: torch.device) -> None:
    """Wait for all operations on the device."""
    if is_accelerator(device):
        _ask(device, "synchronize")(device)


def new_stream(device: torch.device) -> torch.Stream | None:
    """A stream beside the current one; None on a CPU."""
    return _ask(device, "Stream")(device) if is_accelerator(device) else None


def inside(stream: torch.Stream) -> AbstractContextManager[object]:
    """Start operations in this stream inside."""
    block: AbstractContextManager[object] = _ask(stream.device, "stream")(stream)
    return block


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream into which this thread starts operations; None on a CPU."""
    return _ask(device, "current_stream")(device) if is_accelerator(device) else None


def record(device: torch.device, timed: bool = False, on: torch.Stream | None = None) -> torch.Event | None:
    """An event after all operations of a stream so far; None on a CPU.

    Args:
        timed: whether `elapsed_time` will be called on it.
        on: the stream; the current one by default.
    """
    if not is_accelerator(device):
        return None
    event: torch.Event = _ask(device, "Event")(enable_timing=timed)
    event.record(_ask(device, "current_stream")(device) if on is None else on)
    return event


def wait_in_stream(device: torch.device, event: torch.Event) -> None:
    """Make operations that are started from now on wait for an event; the host goes on."""
    if is_accelerator(device):
        _ask(device, "current_stream")(device).wait_event(event)


def finish_stream(device: torch.device) -> None:
    """Wait for the operations of the current stream."""
    if is_accelerator(device):
        _ask(device, "current_stream")(device).synchronize()


def page_locked(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised page-locked host memory [numel], from torch's pool; copies between it and the device are async."""
    return torch.empty(numel, dtype=dtype, pin_memory=is_accelerator(device))


def register(device: torch.device, address: int, nbytes: int) -> Callable[[], object]:
    """Page-lock existing memory of whole pages; returns the function that unlocks it, once no copy uses it.

    Raises:
        OffloadError: the driver refuses, or torch has no call for it (so far it has on CUDA and ROCm).
    """
    if not is_accelerator(device):
        return lambda: None
    runtime = _ask(device, "cudart", OffloadError)()
    code = int(runtime.cudaHostRegister(address, nbytes, PORTABLE))
    if code:
        found = f"{built_for() or device.type} does not register {nbytes:,} bytes of host memory (cudaError {code})"
        raise OffloadError(f"{found}; offload less, or raise the limit of locked memory.")

    def unlock() -> None:
        with suppress(RuntimeError):  # of a device that has failed
            synchronize(device)  # a copy is under way where its owner was dropped without a wait
        runtime.cudaHostUnregister(address)

    return unlock


def total_memory(device: torch.device) -> int | None:
    """Total bytes of the device; None on a CPU, whose memory is the host's."""
    return int(_ask(device, "get_device_properties")(device).total_memory) if is_accelerator(device) else None


def taken_memory(device: torch.device) -> int:
    """Bytes that torch's allocator cannot use: of contexts, libraries and other processes; 0 on a CPU."""
    if not is_accelerator(device):
        return 0
    _ask(device, "empty_cache")()
    free, total = _ask(device, "mem_get_info")(device)
    return max(0, int(total) - int(free) - int(_ask(device, "memory_reserved")(device)))


def peak_memory(device: torch.device) -> int | None:
    """Peak bytes of torch's allocator since the start; None on a CPU, where it does not count."""
    return int(_ask(device, "max_memory_allocated")(device)) if is_accelerator(device) else None


def limit_memory(device: torch.device, nbytes: int | None) -> None:
    """Limit torch's allocator to `nbytes`, or lift an earlier limit; without effect on a CPU."""
    total = total_memory(device)
    if total is None or (nbytes is None and device not in _limited):
        return
    _ask(device, "set_per_process_memory_fraction")(1.0 if nbytes is None else min(1.0, nbytes / total), device)
    _limited.add(device)


def random_state(device: torch.device) -> torch.Tensor | None:
    """The state of the device's own generator, as uint8 on the host; None on a CPU, whose generator is torch's."""
    return _ask(device, "get_rng_state")(device) if is_accelerator(device) else None


def set_random_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Set the generator to a state from `random_state`."""
    if is_accelerator(device) and state is not None:
        _ask(device, "set_rng_state")(state, device)


@contextmanager
def forked_random(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the generators of the CPU and of these devices after the block."""
    by_type: defaultdict[str, set[torch.device]] = defaultdict(set)
    for device in filter(is_accelerator, devices):
        _ask(device, "get_rng_state")
        by_type[device.type].add(device)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        for name, members in by_type.items():
            stack.enter_context(torch.random.fork_rng(members, device_type=name))
        yield


def _is_known(name: str) -> bool:
    try:
        device = torch.device(name)
        torch.get_device_module(device)
    except RuntimeError:
        return False
    return device.type == name and is_accelerator(device)


def _missing(device: torch.device) -> list[str]:
    module = torch.get_device_module(device)
    return [name for name in TRAINING if not hasattr(module, name)]


def _ask(device: torch.device, name: str, error: type[PlanError | OffloadError] = PlanError) -> Any:
    """An attribute of the device's module.

    Raises:
        PlanError: (or `error`) the module lacks it.
    """
    found = getattr(torch.get_device_module(device), name, None)
    if found is None:
        way_out = WAYS_OUT.get(name, "use device='cpu'")
        raise error(f"torch.{device.type} lacks {name}, which zeroshard needs here on {device.type!r}; {way_out}.")
    return found
