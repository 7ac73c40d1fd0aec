"""The room for devices: the CPU's answers, and that each question goes to the device's own module of torch."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeroshard.checkpoint import rng
from zeroshard.comm.mesh import init_mesh
from zeroshard.errors import OffloadError, PlanError
from zeroshard.memory.transfers import ThreadRunner, Transfers
from zeroshard.platform import accelerator
from zeroshard.platform.real import REAL
from zeroshard.traffic import Purpose

CPU, XPU = torch.device("cpu"), torch.device("xpu", 1)
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
Calls = list[tuple[Any, ...]]


class FakeEvent:
    def __init__(self, calls: Calls, enable_timing: bool) -> None:
        self._calls, self.timed = calls, enable_timing

    def record(self, stream: "FakeStream") -> None:
        self._calls.append(("record", stream.name, self.timed))

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.timed and end.timed
        return 5.0


class FakeStream:
    """One that says what it is asked; a context too, as the module's `stream` gives it back."""

    device = XPU

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls, self.name = calls, name

    def wait_event(self, event: FakeEvent) -> None:
        self._calls.append(("wait", self.name))

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._calls, False)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._calls.append(("synchronize", self.name))

    def __enter__(self) -> None:
        self._calls.append(("enter", self.name))

    def __exit__(self, *_: object) -> None:
        self._calls.append(("leave", self.name))


class FakeRuntime:
    def __init__(self, calls: Calls, code: int) -> None:
        self._calls, self._code = calls, code

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self._calls.append(("register", address, nbytes, flags))
        return self._code

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self._calls.append(("unregister", address))


def module(calls: Calls, devices: int = 2, code: int = 0) -> SimpleNamespace:
    """A module of torch for devices that do not exist; what it is told is noted."""

    def noting(name: str, answer: object = None) -> Callable[..., Any]:
        def told(*words: object) -> object:
            calls.append((name, *words))
            return answer

        return told

    current, beside = FakeStream(calls, "current"), count()
    return SimpleNamespace(
        Event=lambda enable_timing: FakeEvent(calls, enable_timing),
        Stream=lambda device: FakeStream(calls, f"stream {next(beside)}"),
        current_stream=lambda device: current,
        stream=lambda stream: stream,
        synchronize=noting("synchronize all"),
        set_device=noting("set_device"),
        device_count=lambda: devices,
        is_available=lambda: devices > 0,
        get_rng_state=noting("get_rng_state", torch.arange(3, dtype=torch.uint8)),
        set_rng_state=noting("set_rng_state"),
        get_device_name=noting("name", "A Fine Card"),
        get_device_properties=lambda device: SimpleNamespace(total_memory=1000),
        empty_cache=noting("empty_cache"),
        mem_get_info=lambda device: (600, 1000),
        memory_reserved=lambda device: 100,
        max_memory_allocated=lambda device: 77,
        set_per_process_memory_fraction=noting("fraction"),
        cudart=lambda: FakeRuntime(calls, code),
    )


def install(monkeypatch: pytest.MonkeyPatch, fake: SimpleNamespace) -> None:
    """Let torch find the fake for devices of type xpu; torch itself asks in the same way."""
    found = torch.get_device_module

    def look_up(device: torch.device | str | None = None) -> Any:
        return fake if torch.device(device or CPU).type == "xpu" else found(device)

    monkeypatch.setattr(torch, "get_device_module", look_up)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls that a fake of torch.xpu gets; it is this machine's accelerator, with two devices."""
    told: Calls = []
    install(monkeypatch, module(told))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    return told


@pytest.mark.parametrize("device", [CPU, torch.device("cpu", 0), torch.device("meta")], ids=str)
def test_the_cpu_answers_everything(device: torch.device) -> None:
    assert not accelerator.is_accelerator(device)
    accelerator.select(device)
    accelerator.synchronize(device)
    accelerator.finish_stream(device)
    accelerator.limit_memory(device, 1)
    assert accelerator.new_stream(device) is accelerator.record(device) is None
    assert accelerator.title(device) is accelerator.total_memory(device) is accelerator.peak_memory(device) is None
    assert accelerator.taken_memory(device) == 0
    assert accelerator.random_state(device) is None
    accelerator.set_random_state(device, None)
    accelerator.set_random_state(device, torch.zeros(3, dtype=torch.uint8))  # of another device
    accelerator.register(device, 4096, 4096)()
    plain = accelerator.page_locked(3, torch.bfloat16, device)
    assert (plain.device.type, plain.shape, plain.dtype, plain.is_pinned()) == ("cpu", (3,), torch.bfloat16, False)


@pytest.mark.parametrize("versions, words", [
    ({}, None),
    ({"cuda": "13.0"}, "CUDA 13.0"),
    ({"hip": "7.1"}, "ROCm 7.1"),
    ({"xpu": "20250302"}, "XPU 20250302"),
])  # fmt: skip
def test_what_torch_is_built_for(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], words: str | None) -> None:
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, versions.get(name))
    assert accelerator.built_for() == words


def test_backends_of_collectives() -> None:
    names = {name: accelerator.backend(torch.device(name)) for name in ("cpu", "cuda", "xpu")}
    assert names == {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}  # ROCm's devices are "cuda" too
    with pytest.raises(PlanError, match="no backend for 'mtia'"):
        accelerator.backend(torch.device("mtia", 0))


class TestWithAnAccelerator:
    def test_one_is_taken_where_each_rank_has_one(self, calls: Calls) -> None:
        assert (accelerator.kind(), accelerator.count(), accelerator.count("cpu")) == ("xpu", 2, 0)
        assert accelerator.pick(None, ranks=2, number=1) == XPU
        assert accelerator.pick(None, ranks=3, number=1) == accelerator.pick("cpu", 2, 1) == CPU
        assert accelerator.pick("xpu", ranks=2) == torch.device("xpu", 0)
        with pytest.raises(PlanError, match="3 local ranks ask for 'xpu' and 2 GPUs are visible; start 2 ranks or"):
            accelerator.pick("xpu", ranks=3)

    def test_one_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, module([], devices=0))
        with pytest.raises(PlanError, match=r"device='xpu' needs a GPU, and PyTorch sees none.*device='cpu'"):
            accelerator.pick("xpu")

    def test_one_that_cannot_train_is_refused_and_never_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
        monkeypatch.setattr(torch.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
        assert (accelerator.kind(), accelerator.pick()) == ("cpu", CPU)
        with pytest.raises(PlanError, match=r"'mps' cannot train: torch.mps lacks Stream, .*; use device='cpu'"):
            accelerator.pick("mps")

    @pytest.mark.parametrize("name", ["tpu", "", "meta", "vulkan", "cpu:0", "cuda:0", "nn"])
    def test_names_that_are_no_types(self, name: str) -> None:
        with pytest.raises(PlanError, match=f"Device '{name}' is unknown; use 'cpu' or 'cuda'"):
            accelerator.pick(name)

    def test_questions_go_to_its_module(self, calls: Calls) -> None:
        accelerator.select(XPU)
        accelerator.synchronize(XPU)
        accelerator.finish_stream(XPU)
        assert calls == [("set_device", XPU), ("synchronize all", XPU), ("synchronize", "current")]
        assert accelerator.title(XPU) == "A Fine Card"

    def test_its_memory(self, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accelerator, "_limited", set())
        assert (accelerator.total_memory(XPU), accelerator.peak_memory(XPU)) == (1000, 77)
        assert accelerator.taken_memory(XPU) == 300  # of 400 that are not free, torch's allocator has 100
        REAL.limit(XPU, None)  # a limit of the user's own stays
        accelerator.limit_memory(XPU, 250)
        REAL.limit(XPU, 4000)
        REAL.limit(XPU, 125)
        REAL.limit(XPU, None)
        fractions = [("fraction", share, XPU) for share in (0.25, 1.0, 0.125, 1.0)]
        assert calls == [("empty_cache",), *fractions]

    def test_its_generator(self, calls: Calls) -> None:
        state = accelerator.random_state(XPU)
        assert state is not None
        accelerator.set_random_state(XPU, state)
        assert calls == [("get_rng_state", XPU), ("set_rng_state", state, XPU)]
        calls.clear()
        before = torch.get_rng_state()
        with accelerator.forked_random([CPU, XPU, XPU]):
            torch.rand(1)
            assert calls == [("get_rng_state", XPU)]
        assert [name for name, *_ in calls] == ["get_rng_state", "set_rng_state"]
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_checkpoint_keeps_its_generator_under_its_type(self, calls: Calls) -> None:
        state = dict(rng.streams(XPU))["xpu"]
        assert dict(rng.streams(CPU)).keys() == {"torch", "python", "numpy"}
        calls.clear()
        rng.restore("xpu", state, CPU)
        rng.restore("cpu", state, CPU)
        rng.restore("cuda", state, XPU)
        assert calls == []
        rng.restore("xpu", state, XPU)
        assert calls == [("set_rng_state", state, XPU)]

    def test_a_mesh_takes_it(self, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert init_mesh().device == init_mesh(device="xpu").device == XPU
        assert init_mesh(device="cpu").device == CPU

    def test_copies_wait_for_the_compute_before_them_and_results_for_copies(self, calls: Calls) -> None:
        link, into = Transfers(ThreadRunner(XPU, timeout=10.0)), torch.zeros(2)
        task = link.copy(torch.ones(2), into, Purpose.PARAMETERS_UP, "a")
        stream = "stream 1"  # of two, one for each direction
        handed = [("record", "current", False), ("enter", stream), ("wait", stream), ("record", stream, False)]
        assert calls == [*handed, ("leave", stream)]
        calls.clear()
        task.wait()
        assert calls == [("record", "current", True), ("wait", "current"), ("record", "current", True)]
        assert into.tolist() == [1, 1]
        _, exposed = link.reset()
        assert exposed[Purpose.PARAMETERS_UP] >= 0.005  # between the two events, beside the host's own time

    def test_host_memory_is_registered(self, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
        release = accelerator.register(XPU, 8192, 4096)
        assert calls == [("register", 8192, 4096, 1)]
        release()
        assert calls[1:] == [("synchronize all", XPU), ("unregister", 8192)]  # no copy is under way then
        install(monkeypatch, module(calls, code=2))
        with pytest.raises(OffloadError, match=r"does not register 4,096 bytes of host memory \(cudaError 2\)"):
            accelerator.register(XPU, 8192, 4096)

    @pytest.mark.parametrize("lacking, ask, found, way_out", [
        ("cudart", lambda: accelerator.register(XPU, 4096, 4096), OffloadError, "train without offload"),
        ("set_per_process_memory_fraction", lambda: REAL.limit(XPU, 1), PlanError, "leave out device_memory"),
        ("mem_get_info", lambda: accelerator.taken_memory(XPU), PlanError, "use device='cpu'"),
        ("Stream", lambda: ThreadRunner(XPU, 1.0), PlanError, "use device='cpu'"),
        ("Event", lambda: accelerator.record(XPU), PlanError, "use device='cpu'"),
    ])  # fmt: skip
    def test_lacking_names_are_refused_where_they_are_needed(
        self, calls: Calls, lacking: str, ask: Callable[[], object], found: type[Exception], way_out: str
    ) -> None:
        delattr(torch.get_device_module(XPU), lacking)
        with pytest.raises(found, match=f"torch.xpu lacks {lacking}, .* on 'xpu'; {way_out}"):
            ask()


@NEEDS_CUDA
class TestOnCuda:
    """The same on a real device, of CUDA or ROCm."""

    def test_it_is_found_and_named(self) -> None:
        device = accelerator.pick()
        assert (device.type, accelerator.kind(), accelerator.backend(device)) == ("cuda", "cuda", "nccl")
        assert accelerator.count() == torch.cuda.device_count() and accelerator.built_for()
        assert accelerator.title(device) == torch.cuda.get_device_name(device)

    def test_a_copy_arrives(self) -> None:
        device = accelerator.pick()
        here = accelerator.page_locked(2**20, torch.float32, device).fill_(3)
        assert here.is_pinned()
        link, there = Transfers(ThreadRunner(device, timeout=60.0)), torch.zeros(2**20, device=device)
        task = link.copy(here, there, Purpose.PARAMETERS_UP, "a")
        task.wait()
        assert float(there.sum()) == 3 * 2**20
        accelerator.synchronize(device)
        assert link.stalls and link.reset()[1][Purpose.PARAMETERS_UP] >= 0

    def test_its_generator_and_its_memory(self) -> None:
        device = accelerator.pick()
        with accelerator.forked_random([device]):
            first = torch.rand(3, device=device)
        assert torch.equal(torch.rand(3, device=device), first)
        total, peak = accelerator.total_memory(device), accelerator.peak_memory(device)
        assert total is not None and peak is not None and 0 < peak < total
        assert 0 < accelerator.taken_memory(device) < total
