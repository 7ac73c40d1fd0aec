"""`zeroshard partition`: the split of a profiled model over a cluster, beside plain alternatives."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zeroshard.errors import ConfigError, PlanError
from zeroshard.pipeline.partition.cluster import Cluster
from zeroshard.pipeline.partition.graph import GraphProfile, LayerGraph
from zeroshard.pipeline.partition.pipedream import Partition, PartitionStage, Shape, partition
from zeroshard.pipeline.partition.profile import LayerCost, Profile
from zeroshard.pipeline.partition.reading import read_profile
from zeroshard.pipeline.partition.simulated import MEMORY, SIMULATED, fastest, leanest
from zeroshard.report.plain_table import plain_table
from zeroshard.text import format_bytes, parse_bytes

RIVALS: dict[str, Shape] = {"data parallel": "data parallel", "straight pipeline": "straight", "one device": "any"}

NARROW, DETAILS = 80, ("exchange", "versions")  # columns of a terminal below which the table leaves details out


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """Split a profiled model into stages and replicas (PipeDream's dynamic program, SOSP 2019, section 3.1)."""

    profile: Path
    """File that `zeroshard profile` wrote, such a file with `edges` for a graph of layers, or the graph.txt of
    PipeDream's profiler."""
    cluster: Path | None = None
    """TOML file of the cluster: memory, and from the innermost outwards a [[level]] each with count and gbps."""
    devices: int | None = None
    """Without a file: number of devices, all linked alike."""
    link_gbps: float | None = None
    """Without a file: gigabits per second between any two devices."""
    memory: str | None = None
    """Limit on the memory of one device, such as 16GiB; overrides the file's."""
    state_copies: float = 3
    """Copies of its parameters that a device keeps besides the versions of the weights: gradients and optimizer states;
    3 is AdamW, 2 SGD with momentum, 0 the paper's own count."""
    objective: Literal["simulated", "paper", "released", "memory"] = "simulated"
    """Time to minimise: as the paper defines it ("paper"), as the authors' program computes it ("released"), or, over
    the splits that both find, the simulated time of the schedule ("simulated"); or first the bytes of the device with
    the largest need, then the simulated time ("memory")."""
    json: bool = False
    """Print JSON instead of tables."""

    def __post_init__(self) -> None:
        if (self.cluster is None) == (self.devices is None):
            raise ConfigError("give the cluster once: --cluster FILE, or --devices 4 --link-gbps 10.")
        if self.cluster is not None and self.link_gbps is not None:
            raise ConfigError("the cluster file has the links; leave out --link-gbps, or use --devices.")
        if self.devices is not None and self.devices < 1:
            raise ConfigError(f"devices is {self.devices}; it must be 1 or more.")
        if self.devices is not None and self.devices > 1 and self.link_gbps is None:
            raise ConfigError(f"{self.devices} devices need a link; add --link-gbps, such as --link-gbps 10.")
        if self.link_gbps is not None and not 0 < self.link_gbps < math.inf:
            raise ConfigError(f"link_gbps is {self.link_gbps}; it must be more than 0 and finite.")
        if not 0 <= self.state_copies < math.inf:
            raise ConfigError(f"state_copies is {self.state_copies}; it must be 0 or more and finite.")
        if self.memory is not None:
            parse_bytes(self.memory)

    def described_cluster(self) -> Cluster:
        """The cluster that the options describe."""
        memory = None if self.memory is None else parse_bytes(self.memory)
        if self.cluster is None:
            return Cluster.flat(self.devices or 1, (self.link_gbps or math.inf) * 1e9 / 8, memory)
        cluster = Cluster.load(self.cluster)
        return cluster if memory is None else replace(cluster, memory_bytes=memory)


@dataclass(frozen=True)
class Rival:
    """An alternative use of the cluster; without a partition, `reason` says why there is none."""

    name: str
    partition: Partition | None
    fits: bool
    reason: str = ""


def run_partition(argv: Sequence[str]) -> None:
    """Print the split that the options ask for.

    Raises:
        ConfigError: wrong options, or a wrong file of the cluster.
        DataError: no profile.
        PlanError: no split fits.
    """
    from zeroshard.train.options import parse

    options = parse(PartitionOptions, argv, "zeroshard partition")
    profile, cluster = read_profile(options.profile), options.described_cluster()
    model = profile.graph if isinstance(profile, GraphProfile) else profile.layers
    chosen = _split(model, cluster, options)
    rivals = [_rival(name, model, cluster, options) for name in RIVALS]
    if options.json:
        print(json.dumps(_as_json(profile, cluster, chosen, rivals), indent=1, allow_nan=False))
    else:
        _print(profile, cluster, chosen, rivals)


def train_options(layers: Sequence[LayerCost], chosen: Partition) -> list[str]:
    """The options of `zeroshard train` for this split; one stage is data parallel."""
    ranks = ["--ranks", str(sum(chosen.replicas))]
    if len(chosen.stages) == 1:
        return ranks
    firsts = [layers[stage.first].name for stage in chosen.stages[1:]]
    replicas = [str(number) for number in chosen.replicas]
    stages = ["--pipeline-parallel", str(len(chosen.stages)), "--pipeline-parallel.split", *firsts]
    return [*ranks, *stages, "--pipeline-parallel.replicas", *replicas]


def _split(
    model: Sequence[LayerCost] | LayerGraph, cluster: Cluster, options: PartitionOptions, shape: Shape = "any"
) -> Partition:
    if options.objective in (SIMULATED, MEMORY):
        find = fastest if options.objective == SIMULATED else leanest
        return find(model, cluster, state_copies=options.state_copies, shape=shape)
    return partition(model, cluster, options.objective, state_copies=options.state_copies, shape=shape)


def _rival(name: str, model: Sequence[LayerCost] | LayerGraph, cluster: Cluster, options: PartitionOptions) -> Rival:
    """The best of its kind that fits, else the fastest with any memory."""
    limits = Cluster.flat(1, math.inf, cluster.memory_bytes) if name == "one device" else cluster
    reason = ""
    for limited in (limits, replace(limits, memory_bytes=None)):
        try:
            found = _split(model, limited, options, RIVALS[name])
            return Rival(name, found, limited is limits)
        except PlanError as error:
            reason = str(error)
    return Rival(name, None, False, reason)


def _as_json(
    profile: Profile | GraphProfile, cluster: Cluster, chosen: Partition, rivals: Sequence[Rival]
) -> dict[str, Any]:
    return {
        "model": profile.model,
        "machine": profile.machine,
        "microbatch_rows": profile.microbatch_rows,
        "cluster": {
            "levels": [{"count": y.count, "bytes_per_second": _finite(y.bandwidth)} for y in cluster.levels],
            "memory_bytes": cluster.memory_bytes,
        },
        "objective": chosen.objective,
        **_split_json(chosen),
        "alternatives": [
            {"name": rival.name, "fits": rival.fits}
            | ({"reason": rival.reason} if rival.partition is None else _split_json(rival.partition))
            for rival in rivals
        ],
        "options": None if isinstance(profile, GraphProfile) else train_options(chosen.layers, chosen),
    } | ({"order": [y.name for y in chosen.layers]} if isinstance(profile, GraphProfile) else {})


def _split_json(split: Partition) -> dict[str, Any]:
    layers = split.layers
    return {
        "seconds_per_microbatch": split.seconds,
        "microbatches_per_second": _finite(split.throughput),
        "memory_bytes": split.memory_bytes,
        "stages": [
            asdict(stage) | {"first_layer": layers[stage.first].name, "last_layer": layers[stage.last].name}
            for stage in split.stages
        ],
    }


def _finite(number: float) -> float | None:
    """The number, or None for infinity, which JSON lacks."""
    return number if math.isfinite(number) else None


def _print(profile: Profile | GraphProfile, cluster: Cluster, chosen: Partition, rivals: Sequence[Rival]) -> None:
    console = Console(highlight=False)
    console.print(f"{_described(profile)} as measured on {profile.machine},", markup=False)
    console.print(f"over {cluster}; objective: {chosen.objective}")
    console.print(_stage_table(chosen.layers, chosen, console.width))
    console.print(_rival_table(chosen, rivals))
    for rival in rivals:
        if rival.partition is None:
            console.print(f"No {rival.name}: {rival.reason}")
        elif rival.fits and rival.partition.seconds < chosen.seconds:
            console.print(f"The chosen split uses all {cluster.devices} devices; {rival.name} is faster.")
    if chosen.merged:
        console.print("The graph has too many places for a cut: each branch was taken as one layer, and stayed whole.")
    if isinstance(profile, GraphProfile):
        console.print(
            "\nLayers stand in the order of the stages; --json prints all of it. "
            "[b]zeroshard train[/b] cuts a model whose blocks follow this order, by the first block of each stage."
        )
        return
    console.print("\nAs options of [b]zeroshard train[/b]:")
    console.print("  " + " ".join(train_options(chosen.layers, chosen)), soft_wrap=True, markup=False)


def _described(profile: Profile | GraphProfile) -> str:
    layers = f", a graph of {len(profile.graph.layers)} layers" if isinstance(profile, GraphProfile) else ""
    rows = f", {profile.microbatch_rows} rows per microbatch" if profile.microbatch_rows else ""
    return f"{profile.model}{layers}{rows},"


def _stage_table(layers: Sequence[LayerCost], chosen: Partition, width: int) -> Table:
    """The stages; a narrow terminal leaves out two columns, which --json has."""
    table = plain_table(
        "The chosen split, times in ms per microbatch",
        caption="exchange: gradients, between replicas; send: to the next stage and back; versions: of the weights, "
        "and as many microbatches in flight, under schedule pipedream. Bold is the slowest.",
    )
    table.add_column("", justify="right")
    table.add_column("layers", overflow="fold", min_width=14)
    columns = ("replicas", "compute", "exchange", "send", "versions", "memory")
    shown = [column for column in columns if width >= NARROW or column not in DETAILS]
    for column in shown:
        table.add_column(column, justify="right", no_wrap=True)
    for number, stage in enumerate(chosen.stages):
        highest = max(max(other.seconds, other.send_seconds) for other in chosen.stages)
        slow = min(chosen.seconds, highest) * (1 - 1e-9)
        spent = (stage.compute_seconds, stage.sync_seconds)
        slowest = max(spent) if chosen.objective == "paper" else 0.0
        bold = [stage.seconds >= slow and time >= slowest for time in spent] + [stage.send_seconds >= slow]
        times = (_milliseconds(t, b) for t, b in zip((*spent, stage.send_seconds), bold, strict=True))
        texts = (str(stage.replicas), *times, str(stage.versions), format_bytes(stage.memory_bytes))
        row = dict(zip(columns, texts, strict=True))
        table.add_row(str(number), escape(_span(layers, stage)), *(row[column] for column in shown))
    return table


def _span(layers: Sequence[LayerCost], stage: PartitionStage) -> str:
    first, last = layers[stage.first].name, layers[stage.last].name
    return first if stage.first == stage.last else f"{first} … {last} ({stage.last - stage.first + 1})"


def _rival_table(chosen: Partition, rivals: Sequence[Rival]) -> Table:
    table = plain_table(
        "Against alternatives", ["", "replicas"], ["ms per\nmicrobatch", "microbatches\nper s", "memory"]
    )
    table.columns[1].min_width = len("replicas")
    for name, split, fits in (("chosen", chosen, True), *((r.name, r.partition, r.fits) for r in rivals)):
        if split is None:
            table.add_row(name, "none")
            continue
        table.add_row(
            name,
            _shape(split.replicas),
            _milliseconds(split.seconds),
            f"{split.throughput:,.3f}",
            format_bytes(split.memory_bytes) + ("" if fits else ", over"),
            style="bold" if split is chosen else "",
        )
    return table


def _shape(replicas: tuple[int, ...]) -> str:
    if len(replicas) > 4 and len(set(replicas)) == 1:
        return f"{replicas[0]}-…-{replicas[0]} ({len(replicas)})"
    return "-".join(map(str, replicas))


def _milliseconds(seconds: float, bold: bool = False) -> str:
    if seconds == 0:
        return "–"
    text = f"{1e3 * seconds:,.{3 if seconds < 0.01 else 1}f}"
    return f"[b]{text}[/b]" if bold else text
