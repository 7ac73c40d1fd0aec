"""Claims of papers about pipelines: idle time, microbatches in flight, weight versions, and a split."""

from collections.abc import Iterable, Iterator
from fractions import Fraction

from zeroshard.pipeline.partition.cluster import Cluster
from zeroshard.pipeline.partition.pipedream import partition
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.reproduce.claim import Claim, Reading, Say
from zeroshard.schedule import Layout, PipelineSchedule
from zeroshard.schedule.orders import STREAMING
from zeroshard.schedule.peaks import Peak, peaks
from zeroshard.schedule.simulate import Costs, Simulation, simulate

CASES = ((2, 4), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64))  # stages d, microbatches m
STREAMS = CASES[:5]
CHUNKED = ((2, 4, 2), (4, 8, 2), (4, 8, 4), (8, 64, 4))  # with chunks v
STEPS = 4  # of a stream, so that its steady state shows
FORWARD, BACKWARD = Fraction(1), Fraction(2)


def simulated(name: str, stages: int, microbatches: int, chunks: int = 1, steps: int = 1) -> Simulation:
    """A simulation in exact fractions: equal stages, backwards twice as long as forwards, messages without time."""
    pipeline = PipelineSchedule(name, Layout.equal(stages, chunks), microbatches)
    costs = Costs.uniform(pipeline.layout, FORWARD, BACKWARD)  # type: ignore[arg-type]
    return simulate(pipeline.stretch(steps), pipeline.layout, costs)


def peaks_of(name: str, stages: int, microbatches: int, steps: int = 1) -> list[Peak]:
    """The most microbatches or versions of each stage, counted in its list of actions."""
    pipeline = PipelineSchedule(name, Layout.equal(stages, 1), microbatches)
    return peaks(pipeline.stretch(steps), 1)


def gpipe_bubble(say: Say) -> Iterator[Reading]:
    """Idle share of all time: (d-1)/(m+d-1)."""
    for d, m in CASES:
        ours = simulated("gpipe", d, m)
        idle = Fraction(sum(ours.idle)) / (Fraction(ours.makespan) * d)
        yield Reading(f"d = {d}, m = {m}", str(Fraction(d - 1, m + d - 1)), idle, exact=True)


def flush_bubble(say: Say) -> Iterator[Reading]:
    """Idle time over ideal time: (d-1)/m."""
    for d, m in CASES:
        yield Reading(f"d = {d}, m = {m}", str(Fraction(d - 1, m)), _over_ideal(simulated("1f1b", d, m)), exact=True)


def interleaved_bubble(say: Say) -> Iterator[Reading]:
    """Idle time over ideal time: (d-1)/(v·m)."""
    for d, m, v in CHUNKED:
        ours = _over_ideal(simulated("interleaved", d, m, v))
        yield Reading(f"d = {d}, m = {m}, v = {v}", str(Fraction(d - 1, v * m)), ours, exact=True)


def streaming_bubble(say: Say) -> Iterator[Reading]:
    """Idle share of the steady state: none."""
    for name in STREAMING:
        for d, m in STREAMS:
            say(f"{name}, d = {d}")
            steady = simulated(name, d, m, steps=STEPS).steady
            assert steady is not None
            yield Reading(f"{name}, d = {d}, m = {m}", "0", Fraction(steady.bubble_fraction), exact=True)


def in_flight(say: Say) -> Iterator[Reading]:
    """Microbatches whose activations each stage keeps: d - s under 1F1B, all m under GPipe."""
    for name in ("1f1b", "gpipe"):
        for d, m in STREAMS:
            published = range(d, 0, -1) if name == "1f1b" else (m,) * d
            ours = [peak.in_flight for peak in peaks_of(name, d, m)]
            yield Reading(f"{name}, d = {d}, m = {m}", _listed(published), _listed(ours))


def versions(say: Say) -> Iterator[Reading]:
    """Versions of its weights that each stage keeps: d - s under PipeDream, two under 2BW."""
    for name in STREAMING:
        for d, m in STREAMS:
            published = range(d, 0, -1) if name == "pipedream" else (2,) * d
            ours = [peak.weight_versions for peak in peaks_of(name, d, m, STEPS)]
            yield Reading(f"{name}, d = {d}, m = {m}", _listed(published), _listed(ours))


def vgg16(images: int = 64, flops: float = 4e12) -> list[LayerCost]:
    """VGG-16 (1409.1556, table 1, D) by its shapes at 224 x 224 in fp32, a backward twice its forward.

    Args:
        images: in one microbatch.
        flops: per second; by default about those of a V100 without tensor cores in such layers.
    """
    layers: list[LayerCost] = []

    def add(name: str, macs: int, output: int, saved: int, weights: int) -> None:
        seconds = 2 * macs * images / flops
        layers.append(LayerCost(name, seconds, 2 * seconds, 4 * images * output, 4 * images * saved, 4 * weights))

    channels, side = 3, 224
    for block, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for number in range(1, count + 1):
            kernel, pixels = 9 * channels * width, side * side
            pooled = 4 if number == count else 1  # a pooling belongs to the convolution before it
            add(f"conv{block}_{number}", kernel * pixels, width * pixels // pooled, width * pixels, kernel + width)
            channels = width
        side //= 2
    inputs = channels * side * side
    for number, width in enumerate((4096, 4096, 1000), 6):
        add(f"fc{number}", inputs * width, width, width, (inputs + 1) * width)
        inputs = width
    return layers


def vgg16_split(say: Say) -> Iterator[Reading]:
    """Replicas of each stage over 16 workers."""
    for cluster, gbps in (("4 x 4 (A)", 10), ("2 x 8 (B)", 25)):
        layers = vgg16()
        found = partition(layers, Cluster.flat(16, gbps * 1e9 / 8))
        last = layers[found.stages[-1].first].name
        ours = "-".join(map(str, found.replicas))
        yield Reading(f"{cluster}, {gbps} Gb/s", "15-1", ours, note=f"last stage from {last} on")


def _over_ideal(ours: Simulation) -> Fraction:
    return Fraction(sum(ours.idle)) / Fraction(sum(ours.busy))


def _listed(numbers: Iterable[object]) -> str:
    """The numbers of all stages, the first stage's first."""
    return " ".join(map(str, numbers))


_SIMULATED = (
    "The lists that the engine executes are simulated in exact fractions: d equal stages, backwards of twice the "
    "forward's time, messages of none."
)
_COUNTED = "Counted in the lists that the engine executes, from the first stage to the last."
PIPELINES = (
    Claim(
        "gpipe-bubble",
        "idle share of a step under GPipe: (d-1)/(m+d-1)",
        "GPipe, Huang et al., 1811.06965, section 2.3",
        "of all time",
        _SIMULATED,
        gpipe_bubble,
    ),
    Claim(
        "1f1b-bubble",
        "idle time over ideal time under 1F1B with a flush: (d-1)/m",
        "PTD-P, Narayanan et al., 2104.04473, section 2.2.1",
        "of ideal time",
        _SIMULATED,
        flush_bubble,
    ),
    Claim(
        "interleaved-bubble",
        "idle time over ideal time with v chunks per stage: (d-1)/(v·m)",
        "PTD-P, Narayanan et al., 2104.04473, section 2.2.2",
        "of ideal time",
        _SIMULATED,
        interleaved_bubble,
    ),
    Claim(
        "streaming-bubble",
        "no idle time in the steady state of PipeDream and PipeDream-2BW",
        "PipeDream, Narayanan et al., SOSP 2019, section 3.2; PipeDream-2BW, 2006.09503, section 3.1",
        "of all time in the steady state",
        f"{_SIMULATED} Four steps follow each other; what is between fill and drain is counted.",
        streaming_bubble,
    ),
    Claim(
        "in-flight",
        "microbatches whose activations a stage keeps: d-s under 1F1B, m under GPipe",
        "PipeDream-2BW, 2006.09503, section 2.2; PTD-P, 2104.04473, section 2.2.1",
        "microbatches, by stage",
        _COUNTED,
        in_flight,
    ),
    Claim(
        "weight-versions",
        "versions of the weights that a stage keeps: d-s under PipeDream, 2 under 2BW",
        "PipeDream, SOSP 2019, section 3.3; PipeDream-2BW, 2006.09503, section 3.1",
        "versions, by stage",
        _COUNTED,
        versions,
    ),
    Claim(
        "vgg16-split",
        "PipeDream's split of VGG-16 over 16 workers",
        "PipeDream, Narayanan et al., SOSP 2019, table 1, rows of VGG-16",
        "replicas of each stage",
        "The partitioner splits VGG-16 over 16 workers that are all linked alike, at the rate between the paper's "
        "machines. The costs are not those that the paper measured, but worked out from the shapes of the layers at "
        "an assumed 4 TFLOP/s, 64 images per microbatch; at 7 TFLOP/s the split at 10 Gb/s would be 14-1-1.",
        vgg16_split,
    ),
)
