"""The partitioner's objectives against one another, under both published cost models and under the simulator.

    python benchmarks/partition.py [--json FILE]

Six models by their published layer sizes (VGG-16, AlexNet, ResNet-50, GNMT-8, AWD-LM, a 12-block Transformer), each
layer as fast as its matrix products are at half of a V100's or a TITAN's fp32 peak, backward twice forward; on 4, 8 and
16 devices with links of 10 and 25 Gb/s, as in PipeDream's clusters. Nothing is timed; each objective's split is
evaluated under three models of time:

- paper: max(compute, 2 (m-1) w / B) / m for each stage (SOSP 2019, section 3.1);
- released: (compute + 4 (m-1) w / (B m)) / m, as the authors' program (msr-fiddle/pipedream) computes it;
- simulated: PipeDream's schedule on a clock (`zeroshard.pipeline.partition.simulated`); a reduction sends
  2 (m-1) / m of the weights from each replica, once per round of m microbatches, and begins when the round's
  backwards have ended.

Every figure is a split's seconds per microbatch over the least of all objectives' splits on the same machines.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from zeroshard.pipeline.partition.cluster import Cluster
from zeroshard.pipeline.partition.pipedream import OBJECTIVES, Partition, partition
from zeroshard.pipeline.partition.profile import LayerCost
from zeroshard.pipeline.partition.simulated import fastest, timed

BYTES, GBIT = 4, 1e9 / 8
RATES = {"V100": 7.5e12, "TITAN X": 3.3e12}  # FLOP/s of matrix products, about half of the peak
DEVICES, LINKS = (4, 8, 16), (10, 25)


class Layers:
    """Layers of a model, one after another, of one microbatch."""

    def __init__(self, rows: int, rate: float) -> None:
        self.rows, self.rate = rows, rate
        self.costs: list[LayerCost] = []

    def add(self, name: str, macs: float, output: int, parameters: int, saved: int | None = None) -> None:
        """A layer with so many multiplications and outputs per row."""
        forward = 2 * macs * self.rows / self.rate
        nbytes = BYTES * self.rows * output
        kept = nbytes if saved is None else BYTES * self.rows * saved
        self.costs.append(LayerCost(name, forward, 2 * forward, nbytes, kept, BYTES * parameters))

    def convolution(self, name: str, into: int, out: int, kernel: int, side: int, pooled: int = 1) -> None:
        """A square convolution onto side x side, and the pooling behind it."""
        weights = kernel * kernel * into * out
        self.add(name, weights * side * side, out * side * side // pooled**2, weights + out, out * side * side)


def vgg16(rate: float) -> list[LayerCost]:
    """1409.1556, table 1, D; 64 images."""
    found, channels, side = Layers(64, rate), 3, 224
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for n in range(count):
            found.convolution(f"conv{width}_{n}", channels, width, 3, side, 2 if n == count - 1 else 1)
            channels = width
        side //= 2
    for into, out in ((25088, 4096), (4096, 4096), (4096, 1000)):
        found.add(f"fc{into}", into * out, out, into * out + out)
    return found.costs


def alexnet(rate: float) -> list[LayerCost]:
    """1404.5997, one column; 256 images."""
    found = Layers(256, rate)
    shapes = ((3, 64, 11, 55, 2), (64, 192, 5, 27, 2), (192, 384, 3, 13, 1), (384, 256, 3, 13, 1), (256, 256, 3, 13, 2))
    for n, (into, out, kernel, side, pooled) in enumerate(shapes):
        found.convolution(f"conv{n}", into, out, kernel, side, pooled)
    for into, out in ((9216, 4096), (4096, 4096), (4096, 1000)):
        found.add(f"fc{into}", into * out, out, into * out + out)
    return found.costs


def resnet50(rate: float) -> list[LayerCost]:
    """1512.03385, table 1: a layer for each bottleneck; 64 images."""
    found, into = Layers(64, rate), 64
    found.convolution("stem", 3, 64, 7, 112, 2)
    for width, count, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for n in range(count):
            weights = into * width + 9 * width * width + 4 * width * width + (0 if n else 4 * into * width)
            saved = 10 * width * side * side
            found.add(f"block{width}_{n}", weights * side * side, 4 * width * side * side, weights, saved)
            into = 4 * width
    found.add("fc", 2048 * 1000, 1000, 2049 * 1000)
    return found.costs


def gnmt8(rate: float) -> list[LayerCost]:
    """1609.08144: 8 LSTM layers of 1024 on each side, attention; 64 pairs of 50 words, 32,000 of them known."""
    found, tokens, width, words = Layers(64 * 50, rate), 1, 1024, 32_000
    found.add("embedding", 0, tokens * width, 2 * words * width)
    for side in ("encoder", "decoder"):
        for n in range(8):
            into = 2 * width if side == "decoder" or n == 1 else width
            weights = 4 * width * (into + width) * (2 if side == "encoder" and n == 0 else 1)
            found.add(f"{side}{n}", weights, 2 * width if side == "decoder" else width, weights, 8 * width)
    found.add("projection", width * words, words, width * words)
    return found.costs


def awd_lm(rate: float) -> list[LayerCost]:
    """1708.02182 as PipeDream ran it: six LSTM layers, 80 rows of 70 words; no weight is shared."""
    found, words = Layers(80 * 70, rate), 10_000
    found.add("embedding", 0, 400, words * 400)
    for n, (into, out) in enumerate(((400, 1150), *[(1150, 1150)] * 4, (1150, 400))):
        weights = 4 * out * (into + out)
        found.add(f"lstm{n}", weights, out, weights, 6 * out)
    found.add("projection", 400 * words, words, 401 * words)
    return found.costs


def transformer(rate: float) -> list[LayerCost]:
    """GPT-2's smallest: 12 blocks of 768; 8 rows of 1024 tokens."""
    found, width, words, tokens = Layers(8 * 1024, rate), 768, 50_257, 1024
    found.add("embedding", 0, width, words * width)
    for n in range(12):
        found.add(f"block{n}", 12 * width**2 + 2 * tokens * width, width, 12 * width**2, 34 * width)
    found.add("head", width * words, words, width * words)
    return found.costs


MODELS: dict[str, Callable[[float], list[LayerCost]]] = {
    "VGG-16": vgg16,
    "AlexNet": alexnet,
    "ResNet-50": resnet50,
    "GNMT-8": gnmt8,
    "AWD-LM": awd_lm,
    "Transformer": transformer,
}


def sums(layers: Sequence[LayerCost], split: Partition) -> list[tuple[float, float, int, int, int]]:
    """(forward, backward, weights, message, replicas) of each stage; forward in seconds, others in bytes."""
    found = []
    for stage in split.stages:
        part = layers[stage.first : stage.last + 1]
        forward, backward = sum(y.forward_seconds for y in part), sum(y.backward_seconds for y in part)
        sent = part[-1].activation_bytes if stage.last < len(layers) - 1 else 0
        found.append((forward, backward, sum(y.parameter_bytes for y in part), sent, stage.replicas))
    return found


def by_paper(layers: Sequence[LayerCost], split: Partition, bandwidth: float) -> float:
    """Seconds per microbatch, as the paper counts."""
    stages = sums(layers, split)
    times = [max(f + b, 2 * (m - 1) * w / bandwidth) / m for f, b, w, _, m in stages]
    return max(*times, *(2 * sent / bandwidth for _, _, _, sent, _ in stages))


def by_release(layers: Sequence[LayerCost], split: Partition, bandwidth: float) -> float:
    """Seconds per microbatch, as the authors' program counts."""
    stages = sums(layers, split)
    times = [(f + b + 4 * (m - 1) * w / (bandwidth * m)) / m for f, b, w, _, m in stages]
    incoming = [2 * a[3] / (bandwidth * b[4]) for a, b in pairwise(stages)]
    outgoing = [2 * a[3] / (bandwidth * a[4]) for a in stages[1:-1]]
    return max([*times, *incoming, *outgoing])


JUDGES: dict[str, Callable[[Sequence[LayerCost], Partition, float], float]] = {
    "paper": by_paper,
    "released": by_release,
    "simulated": lambda layers, split, rate: timed(layers, split, Cluster.flat(sum(split.replicas), rate)).seconds,
}
NAMES = ("simulated", *OBJECTIVES)


def cases(models: Sequence[str], machines: Sequence[int]) -> list[dict[str, object]]:
    """Models on machines of so many devices: splits, and the time of each by all models of time, over the best."""
    rows: list[dict[str, object]] = []
    for name in models:
        for gpu, rate in RATES.items():
            layers = MODELS[name](rate)
            for devices in machines:
                for gbps in LINKS:
                    cluster = Cluster.flat(devices, gbps * GBIT)
                    splits = {objective: partition(layers, cluster, objective) for objective in OBJECTIVES}
                    splits = {"simulated": fastest(layers, cluster), **splits}
                    times = {j: {o: of(layers, s, gbps * GBIT) for o, s in splits.items()} for j, of in JUDGES.items()}
                    row = {"model": name, "gpu": gpu, "devices": devices, "gbps": gbps}
                    row["replicas"] = {o: "-".join(map(str, s.replicas)) for o, s in splits.items()}
                    row["over_best"] = {j: {o: t / min(of.values()) for o, t in of.items()} for j, of in times.items()}
                    rows.append(row)
    return rows


def main() -> None:
    """Print for each model the worst and the median of every objective under every model of time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = cases(arguments.models, arguments.devices)
    print(f"{'model':12} {'under':20} " + " ".join(f"{o + ' worst, median':>24}" for o in NAMES))
    for name in (*arguments.models, "all"):
        chosen = [row for row in rows if name in (row["model"], "all")]
        for judge in JUDGES:
            cells = []
            for objective in NAMES:
                ratios = [row["over_best"][judge][objective] for row in chosen]  # type: ignore[index]
                cells.append(f"{max(ratios):>14.3f} {statistics.median(ratios):>9.3f}")
            print(f"{name:12} {judge:20} " + " ".join(cells))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
