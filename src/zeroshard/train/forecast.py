"""The prediction of a run beside measurements of its first steps: memory, bytes on the wire, time.

Memory and traffic are compared on the predicted rank; the time of a step is that of the slowest rank.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from zeroshard.comm.collectives import Purpose
from zeroshard.engine import Engine
from zeroshard.memory import Disk, HostMemory
from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.planner.predict.rehearse import by_cause
from zeroshard.planner.predict.result import TEMPORARIES, Prediction
from zeroshard.planner.search.text import seconds as time_text
from zeroshard.platform import accelerator
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.text import format_bytes

STEPS = 20  # before the comparison
TRACKED, TIMED = 5, 6  # the step whose allocations are tracked; the first step whose time counts
FEWEST = 8  # steps that are enough to compare
MEMORY_BAR, TIME_BAR = 0.03, 0.2  # tolerances relative to the prediction; bytes on the wire must be equal
TIERS = (HostMemory, Disk)  # below the device
STALLS = ("host link", "host update", "disk")  # causes of waits for offload
LIBRARIES = 2**26  # bytes of a GPU's workspaces for matrix products, which predictions count as overhead of the device
NOT_PREDICTED = (
    *(Purpose.CONTROL, Purpose.SETUP),
    *(Purpose.GATHER_TO_EVALUATE, Purpose.SEND_TO_EVALUATE, Purpose.SUM_TO_EVALUATE),
)
ADDRESSES = 2**37  # bytes; a longer storage maps memory that other ranks own
NO_PART = (type, ModuleType, FrameType, str, bytes, int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of the first steps of one rank.

    Attributes:
        memory: bytes by category at the peak of one step.
        allocated: peak bytes of the device's allocator since the start; None on a CPU.
        wire: bytes by purpose, of the last step.
        wall: seconds of a step, the median.
        cpu: CPU time of this process in a step, the median.
        causes: seconds of a step by cause, the median of each; empty if not measured separately.
        host: bytes by category in host memory after the last step.
        disk: bytes on a disk, likewise.
        stalls: seconds of a step in which the main thread waited for copies between tiers and for host updates.
    """

    memory: Mapping[str, int]
    allocated: int | None
    wire: Mapping[str, int]
    wall: float
    cpu: float
    causes: Mapping[str, float]
    host: Mapping[str, int] = field(default_factory=dict)
    disk: int = 0
    stalls: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Peak memory."""
        return self.allocated if self.allocated is not None else sum(self.memory.values())


def expectation(prediction: Prediction | None, states_bytes: int, least_seconds: float | None) -> str:
    """Memory and step time that a run should have, in words.

    Args:
        prediction: of the run's plan, if it was asked for.
        states_bytes: model states of this rank on its device, by the formulas.
        least_seconds: of a step at the device's full rate; None where that is not known.
    """
    if prediction is not None:
        peak, time = format_bytes(prediction.peak_bytes), time_text(prediction.seconds)
        return f"{peak} at the peak of rank {prediction.rank} and {time} per step, by the prediction"
    memory = f"model states of {format_bytes(states_bytes)} on each rank's device, activations on top"
    if least_seconds is None:
        return f"{memory}; --predict adds the peak and the time of a step"
    return f"{memory}; a step of {time_text(least_seconds)} at the device's full rate (MFU 100 %)"


class Forecast:
    """Measures the first steps of a run that has a prediction; every rank has a forecast.

    Args:
        rates: source of the rates behind the predicted time.
        steps: number of steps that this process will take.

    Attributes:
        prediction: of the run.
        rates: as given.
        last: number of the step after which to compare; 0 for never.
    """

    def __init__(self, prediction: Prediction, rates: str, engine: Engine, steps: int) -> None:
        self.prediction, self.rates, self._engine = prediction, rates, engine
        self.last = min(STEPS, steps) if steps >= FEWEST else 0
        self._device = engine.mesh.device
        self._taken = 0
        self._tracking = ExitStack()
        self._tracker: Tracker | None = None
        self._memory: dict[str, int] = {}
        self._times: list[tuple[float, float, float, float]] = []  # wall, CPU, in the optimizer, waiting
        self._stalls: list[Mapping[str, float]] = []
        self._entered = self._optimizing = 0.0
        self._hooks = [
            engine.optimizer.register_step_pre_hook(lambda *_: self._enter()),
            engine.optimizer.register_step_post_hook(lambda *_: self._leave()),
        ]

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Measure one step of the engine on this batch, taken inside."""
        self._taken += 1
        number = self._taken
        if number == TRACKED and self.last:
            self._track(batch)
        if self._tracker is not None and number == self._tracked:
            self._tracking.enter_context(self._engine.trace(memory=True))
            self._tracker.start_again()
        self._optimizing = 0.0
        accelerator.synchronize(self._device)
        began, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        except BaseException:
            self._stop_tracking()
            raise
        accelerator.synchronize(self._device)
        if self._tracker is None and TIMED <= number <= self.last:
            took = time.perf_counter() - began, time.process_time() - cpu
            self._times.append((*took, self._optimizing, self._engine.seconds_waiting))
            self._stalls.append(by_cause(self._engine.exposed))
        if self._tracker is not None and number == self._tracked:
            self._memory = self._tracker.peak.snapshot
            self._stop_tracking()
        if number == self.last:
            for hook in self._hooks:
                hook.remove()

    @property
    def due(self) -> bool:
        """Whether the last measured step has just been taken."""
        return self._taken == self.last > 0

    def compare(self) -> "ForecastComparison":
        """The comparison over the measurements of all ranks; a collective call."""
        wire = {row.purpose: row.measured_bytes for row in self._engine.traffic()}
        walls, cpus, optimizing, waiting = map(median, zip(*self._times, strict=True))
        names = dict.fromkeys(name for each in self._stalls for name in each)
        stalls = {name: median(each.get(name, 0.0) for each in self._stalls) for name in names}
        causes = {"optimizer": optimizing, "wire": waiting, **stalls}
        causes["compute"] = max(0.0, walls - sum(causes.values()))
        allocated, ledger = accelerator.peak_memory(self._device), self._engine.ledger
        mine = [self._memory, allocated, wire, ledger.snapshot("host"), ledger.total("disk")]
        times = [walls, cpus, {} if is_accelerator(self._device) else causes, stalls]
        everyone = self._engine.world.agree_on([mine, times], "measurements of the steps")
        memory, allocated, wire, host, disk = everyone[self.prediction.rank][0]
        wall, cpu, causes, stalls = max((times for _, times in everyone), key=lambda rank: float(rank[0]))
        tiers = {"host": host, "disk": disk, "stalls": stalls}
        measured = Measured(memory=memory, allocated=allocated, wire=wire, wall=wall, cpu=cpu, causes=causes, **tiers)
        return ForecastComparison(self.prediction, measured, self.rates, self.last)

    @property
    def _tracked(self) -> int:
        """The step whose peak counts; without flushes, after all microbatches that began before `TRACKED` ended."""
        plan = self._engine.plan
        return TRACKED + (
            -(-2 * plan.pipeline.stages * plan.pipeline.virtual_stages // plan.microbatches) if plan.streams else 0
        )

    def _track(self, batch: Any) -> None:
        """Track every allocation from now on, on top of all tensors that the engine holds."""
        engine, tracker = self._engine, Tracker()
        memories = [(comm.shared.memory, comm.mesh.ranks) for comm in engine.comms if comm.shared is not None]
        found = list(reachable([engine, batch]))
        tracker.off_device = off_device_of(found)
        tensors = (each for each in found if isinstance(each, torch.Tensor))
        for tensor in (each for each in tensors if each.layout is torch.strided):  # else placeholders of gradients
            sharers = next((ranks for memory, ranks in memories if memory.is_common(tensor)), 1)
            if tensor.untyped_storage().nbytes() > ADDRESSES:
                tracker.share(tensor, tensor.untyped_storage().nbytes() + 1)
            elif sharers > 1:
                tracker.share(tensor, sharers)
            else:
                tracker.see(tensor)
        tracker.note = lambda: _split_up(engine, tracker.current)
        self._tracker = tracker
        self._tracking.enter_context(tracker)
        self._tracking.enter_context(tracker.resizing())

    def _stop_tracking(self) -> None:
        self._tracker = None
        self._tracking.close()

    def _enter(self) -> None:
        self._entered = time.perf_counter()

    def _leave(self) -> None:
        self._optimizing += time.perf_counter() - self._entered


@dataclass(frozen=True, slots=True)
class ForecastComparison:
    """Predicted and measured numbers, compared."""

    prediction: Prediction
    measured: Measured
    rates: str
    steps: int

    @property
    def warnings(self) -> list[str]:
        """A sentence with the cause for each tolerance that is missed."""
        return [warning for warning in (self._memory(), self._lower_tiers(), self._wire(), self._time()) if warning]

    @property
    def lines(self) -> list[str]:
        """The comparison as lines of text."""
        p, m = self.prediction, self.measured
        sent, found = sum(_compared(p.wire_bytes).values()), sum(_compared(m.wire).values())
        wire = "equal" if _compared(p.wire_bytes) == _compared(m.wire) else f"measured {format_bytes(found)}"
        host, stalls = (sum(p.host_between_steps.values()), sum(m.host.values())), self._stalls
        lower = [("host", *host), ("disk", p.disk_bytes, m.disk)]
        return [
            f"predicted against measured after {self.steps} steps, rank {p.rank}:",
            f"  memory  predicted {format_bytes(p.peak_bytes)}, measured {format_bytes(m.peak_bytes)} "
            f"({_off(m.peak_bytes, p.peak_bytes)})",
            *(
                f"  {tier}    predicted {format_bytes(planned)}, measured {format_bytes(held)} ({_off(held, planned)})"
                for tier, planned, held in lower
                if planned or held
            ),
            f"  wire    predicted {format_bytes(sent)} per step, {wire}",
            f"  time    predicted {time_text(p.seconds)} per step, measured {time_text(m.wall)} "
            f"({_off(m.wall, p.seconds)}), CPU time {time_text(m.cpu)}",
            *(
                f"  exposed {name}: predicted {time_text(predicted)} per step, measured {time_text(found)}"
                for name, (predicted, found) in stalls.items()
            ),
        ]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All predicted and measured numbers, as plain JSON values."""
        p, m = self.prediction, self.measured
        rows = [_row("memory", "peak", p.peak_bytes, m.peak_bytes)]
        rows += [_row("memory", name, *pair) for name, pair in _pairs(p.memory, m.memory).items()]
        rows += [_row("host", name, *pair) for name, pair in _pairs(p.host_between_steps, m.host).items()]
        rows += [_row("disk", name, *pair) for name, pair in _pairs({"all": p.disk_bytes}, {"all": m.disk}).items()]
        rows += [_row("wire", name, *pair) for name, pair in _pairs(_compared(p.wire_bytes), _compared(m.wire)).items()]
        rows += [_row("time", "step", p.seconds, m.wall), _row("time", "CPU time", self._busy, m.cpu)]
        rows += [_row("time", name, *pair) for name, pair in self._causes.items() if name not in STALLS]
        return rows + [_row("exposed", name, *pair) for name, pair in self._stalls.items()]

    def metrics(self) -> dict[str, Any]:
        """The sums, for the lines of the run's metrics."""
        p, m = self.prediction, self.measured
        return {
            "predicted_peak_bytes": p.peak_bytes,
            "measured_peak_bytes": m.peak_bytes,
            "predicted_wire_bytes": sum(_compared(p.wire_bytes).values()),
            "measured_wire_bytes": sum(_compared(m.wire).values()),
            "predicted_step_seconds": p.seconds,
            "measured_step_seconds": m.wall,
            "measured_cpu_seconds": m.cpu,
            "predicted_exposed_seconds": sum(predicted for predicted, _ in self._stalls.values()),
            "measured_exposed_seconds": sum(found for _, found in self._stalls.values()),
        }

    @property
    def _busy(self) -> float:
        """Predicted seconds in which this process works; on CPUs copies between tiers and host updates are its work."""
        mine = ("compute", "optimizer", *(STALLS if self.measured.causes else ()))
        return sum(self.prediction.causes.get(cause, 0.0) for cause in mine)

    @property
    def _stalls(self) -> dict[str, tuple[float, float]]:
        """Predicted and measured seconds of waits for offload; empty with stages, whose actions include them."""
        if "bubble" in self.prediction.causes:
            return {}
        return _pairs({name: self.prediction.causes.get(name, 0.0) for name in STALLS}, self.measured.stalls)

    @property
    def _causes(self) -> dict[str, tuple[float, float]]:
        """Predicted and measured seconds by cause; a measured wait for another stage counts as "wire"."""
        if not self.measured.causes:
            return {}
        predicted = dict(self.prediction.causes)
        predicted["wire"] = predicted.get("wire", 0.0) + predicted.pop("bubble", 0.0)
        return _pairs(predicted, self.measured.causes)

    def _memory(self) -> str:
        p, m = self.prediction, self.measured
        beside = 0 if m.allocated is None else LIBRARIES
        if -MEMORY_BAR * p.peak_bytes <= m.peak_bytes - p.peak_bytes <= MEMORY_BAR * p.peak_bytes + beside:
            return ""
        name, (predicted, measured) = _furthest(_pairs(p.memory, m.memory))
        return (
            f"memory is {_off(m.peak_bytes, p.peak_bytes)} off the prediction, more than {MEMORY_BAR:.0%}; most of it "
            f"is in {name}: predicted {format_bytes(predicted)}, measured {format_bytes(measured)}."
        )

    def _lower_tiers(self) -> str:
        p, m = self.prediction, self.measured
        pairs = _pairs({**p.host_between_steps, "disk": p.disk_bytes}, {**m.host, "disk": m.disk})
        predicted, found = (sum(each) for each in zip(*pairs.values(), strict=True)) if pairs else (0, 0)
        if abs(found - predicted) <= MEMORY_BAR * predicted:
            return ""
        name, (one, other) = _furthest(pairs)
        return (
            f"memory below the device is {_off(found, predicted)} off the prediction, more than {MEMORY_BAR:.0%}; most "
            f"of it is in {name}: predicted {format_bytes(one)}, measured {format_bytes(other)}."
        )

    def _wire(self) -> str:
        pairs = _pairs(_compared(self.prediction.wire_bytes), _compared(self.measured.wire))
        name, (predicted, measured) = _furthest(pairs)
        if predicted == measured:
            return ""
        both = f"{predicted:,.0f} predicted, {measured:,.0f} measured"
        return f"the bytes on the wire to {name} differ: {both}."

    def _time(self) -> str:
        p, m = self.prediction, self.measured
        if abs(m.wall - p.seconds) <= TIME_BAR * p.seconds:
            return ""
        text = f"a step takes {time_text(m.wall)} ({_off(m.wall, p.seconds)}), more than {TIME_BAR:.0%} off"
        if not self._causes:
            return f"{text}; its causes cannot be told apart on this device. {self.rates}"
        if abs(m.cpu - self._busy) <= TIME_BAR * self._busy:
            return f"{text}; its CPU time, {time_text(m.cpu)}, is as predicted: other load or waiting took the rest."
        name, (predicted, measured) = _furthest(self._causes)
        both = f"predicted {time_text(predicted)}, measured {time_text(max(0.0, measured))}"
        text += f"; most of that is {name}: {both}."
        if m.wall > (1 + TIME_BAR) * (m.cpu + self._causes.get("wire", (0.0, 0.0))[1]):
            text += f" Other load took some of it: the CPU time of this process is {time_text(m.cpu)}."
        return f"{text} {self.rates}"


def off_device_of(found: Sequence[Any]) -> Callable[[torch.Tensor], bool]:
    """A test whether a tensor lies in the host memory or on the disk of the tiers among `found`.

    It also holds for the states that a torch optimizer made for such parameters.
    """
    tiers = [each for each in found if isinstance(each, TIERS)]

    def elsewhere(tensor: torch.Tensor) -> bool:
        return any(tier.holds(tensor) for tier in tiers) or tensor.untyped_storage()._cdata in states

    states: set[int] = set()
    for parameter, state in (pair for each in found if isinstance(each, dict) for pair in [*dict.items(each)]):
        if isinstance(parameter, torch.Tensor) and isinstance(state, dict) and elsewhere(parameter):
            made = [value for value in state.values() if isinstance(value, torch.Tensor)]
            states |= {value.untyped_storage()._cdata for value in made if value.dim()}
    return elsewhere


def reachable(roots: list[Any]) -> Iterator[Any]:
    """All objects reachable from `roots`, gradients included, but not through classes, modules or globals."""
    seen: dict[int, Any] = {}
    stack = list(roots)
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, NO_PART):
            continue
        seen[id(thing)] = thing
        yield thing
        if isinstance(thing, torch.Tensor) and thing.is_leaf and thing.grad is not None:
            stack.append(thing.grad)
        if isinstance(thing, FunctionType):
            stack += [thing.__closure__, thing.__defaults__]
        else:
            stack += gc.get_referents(thing)


def _split_up(engine: Engine, nbytes: int) -> dict[str, int]:
    known = engine.ledger.snapshot()
    return {**known, TEMPORARIES: nbytes - sum(known.values())}


def _compared(wire: Mapping[str, int]) -> dict[str, int]:
    """Bytes by purpose, without purposes that are not predicted or carry none."""
    return {purpose: nbytes for purpose, nbytes in wire.items() if nbytes and purpose not in NOT_PREDICTED}


def _pairs(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    names = dict.fromkeys([*predicted, *measured])
    pairs = {name: (predicted.get(name, 0), measured.get(name, 0)) for name in names}
    return {name: pair for name, pair in pairs.items() if any(pair)}


def _furthest(pairs: Mapping[str, tuple[float, float]]) -> tuple[str, tuple[float, float]]:
    """The pair with the largest difference."""
    return max(pairs.items(), key=lambda pair: abs(pair[1][0] - pair[1][1]), default=("nothing", (0, 0)))


def _row(part: str, name: str, predicted: float, measured: float) -> dict[str, Any]:
    return {"part": part, "name": name, "predicted": predicted, "measured": measured}


def _off(measured: float, predicted: float) -> str:
    return f"{(measured / predicted - 1) * 100:+.1f} %" if predicted else "from nothing"
