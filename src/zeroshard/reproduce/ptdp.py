"""Claims of PTD-P (Narayanan et al., 2104.04473, version 5) about tensor, pipeline and data parallelism together.

The schedules are those that the engine executes, simulated with times of `block_times`. Microbatches and chunks are
those of the paper's scripts (Megatron-LM, examples/sc21).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from zeroshard.plan import Plan
from zeroshard.planner.predict.rehearse import rehearse
from zeroshard.reproduce.block_times import (
    NBYTES,
    GPTShape,
    PassSeconds,
    all_reduce_seconds,
    block_seconds,
    dgx_a100,
    logits_seconds,
    message_seconds,
    update_seconds,
)
from zeroshard.reproduce.claim import Claim, Reading, Say
from zeroshard.schedule import Layout, PipelineSchedule
from zeroshard.schedule.simulate import Costs, simulate
from zeroshard.tensor.policy import TensorParallel
from zeroshard.traffic import Purpose
from zeroshard.train.family import gpt_task
from zeroshard.train.sizes import GPTConfig

PAPER = "PTD-P, Narayanan et al., 2104.04473v5"
OF_A_MODEL, OF_A_GAIN = 0.15, 0.05  # relative tolerance of the published number
BILLION, TERA = 10**9, 10**12


@dataclass(frozen=True)
class TrainingJob:
    """A training job of the paper: t ranks in each layer, p stages, the rest for data; recomputation everywhere."""

    model: GPTShape
    gpus: int
    t: int
    p: int
    batch: int
    rows: int = 1
    chunks: int = 1
    scattered: bool = True

    @property
    def microbatches(self) -> int:
        """Of each pipeline."""
        return self.batch // (self.data_ranks * self.rows)

    @property
    def data_ranks(self) -> int:
        """d."""
        return self.gpus // (self.t * self.p)

    @cached_property
    def tflops(self) -> float:
        """Operations of equation 3 per second and GPU, in 10^12."""
        return self.model.flops(self.batch) / self.gpus / self.seconds / TERA

    @cached_property
    def seconds(self) -> float:
        """Of a step: the simulated schedule, then the sum of gradients, then the update."""
        machines, model, t, p = dgx_a100(self.gpus), self.model, self.t, self.p
        shape = model.block(self.rows)
        block, logits = block_seconds(machines, shape, t), logits_seconds(machines, model, self.rows, t)
        message = message_seconds(machines, NBYTES * shape.elements, p, t, self.scattered)
        schedule = PipelineSchedule("1f1b" if self.chunks == 1 else "interleaved", self._layout, self.microbatches)
        found = simulate(schedule.stretch(), self._layout, self._costs(block, logits, message)).makespan
        own = model.parameters / (t * p)
        found += all_reduce_seconds(machines, NBYTES * own, self.data_ranks, t)
        return found + update_seconds(machines, own)

    @property
    def _layout(self) -> Layout:
        return Layout.equal(self.p, self.chunks)

    def _costs(self, block: PassSeconds, logits: PassSeconds, message: float) -> Costs:
        """A rank waits for its messages, as Megatron-LM's did."""
        count = self.p * self.chunks
        layers = self.model.layers // count
        forward = [layers * block.forward + message] * count
        backward = [layers * (block.forward + block.backward) + message] * count
        forward[-1] += logits.forward - message
        backward[-1] += logits.backward
        backward[0] -= message
        return Costs(tuple(forward), tuple(backward))


TABLE_1 = (  # of table 1: 10^9 parameters, the job, and the published rate
    ("1.7", TrainingJob(GPTShape(24, 2304, 24), 32, 1, 1, 512, 16), "137"),
    ("3.6", TrainingJob(GPTShape(30, 3072, 32), 64, 2, 1, 512, 16), "138"),
    ("7.5", TrainingJob(GPTShape(36, 4096, 32), 128, 4, 1, 512, 16), "142"),
    ("18.4", TrainingJob(GPTShape(40, 6144, 48), 256, 8, 1, 1024, 8), "135"),
    ("39.1", TrainingJob(GPTShape(48, 8192, 64), 512, 8, 2, 1536, 4), "138"),
    ("76.1", TrainingJob(GPTShape(60, 10240, 80), 1024, 8, 4, 1792, 2, 3), "140"),
    ("145.6", TrainingJob(GPTShape(80, 12288, 96), 1536, 8, 8, 2304, 2, 2), "148"),
    ("310.1", TrainingJob(GPTShape(96, 16384, 128), 1920, 8, 16, 2160, 1, 2), "155"),
    ("529.6", TrainingJob(GPTShape(105, 20480, 128), 2520, 8, 35, 2520, 1, 3), "163"),
    ("1008.0", TrainingJob(GPTShape(128, 25600, 160), 3072, 8, 64, 3072), "163"),
)
DEEP = TrainingJob(GPTShape(32, 20480, 128), 64, 8, 8, 32)  # figure 13
SMALL = TrainingJob(GPTShape(32, 3840, 32), 64, 1, 1, 32)  # figures 14 and 15
WIDE = TrainingJob(GPTShape(32, 15360, 128), 64, 8, 8, 128)  # figure 16
ONE_GPU = TrainingJob(GPTShape(4, 4096, 128), 1, 1, 1, 1)  # figure 7
GPT_3 = TrainingJob(GPTShape(96, 12288, 96), 96, 8, 12, 12)  # figures 12 and 18
SIZES = (2, 4, 8, 16, 32)  # ranks of one kind of parallelism; the other has 64 / size
GPT_3_BATCHES, LARGE_BATCH = (12, 24, 36, 48, 60), 120
GPT_3_CHUNKS = 4


def sizes(say: Say) -> Iterator[Reading]:
    """Parameters of the models by equation 2."""
    for name, job, _ in TABLE_1:
        yield Reading(f"{job.model.layers} x {job.model.width}", name, job.model.parameters / BILLION)


def throughput(say: Say) -> Iterator[Reading]:
    """Rates of table 1."""
    for name, job, published in TABLE_1:
        say(f"{name} B")
        what = f"{name} B on {job.gpus}: t = {job.t}, p = {job.p}"
        yield Reading(what, published, job.tflops, within=OF_A_MODEL)


def tensor_or_stages(say: Say) -> Iterator[Reading]:
    """Figure 13: how 64 GPUs are best divided between tensor parallelism and stages."""
    slowest = 1.0
    for batch in (32, 128):
        jobs = [replace(DEEP, t=t, p=DEEP.gpus // t, batch=batch) for t in SIZES]
        best, worst = (pick(jobs, key=lambda job: job.tflops) for pick in (max, min))
        slowest = max(slowest, best.tflops / worst.tflops)
        yield Reading(f"best t, batch {batch}", "8", str(best.t), note=_rates(jobs, "t", SIZES))
    yield Reading("best over worst, up to", "2", slowest, within=OF_A_MODEL)


def data_or_model(say: Say) -> Iterator[Reading]:
    """Figures 14 and 15: stages or tensor parallelism in the place of data parallelism."""
    for batch in (32, 128, 512):
        cut = [replace(SMALL, p=size, batch=batch) for size in SIZES]
        yield Reading(f"more stages, batch {batch}", "slower", _trend(cut), note=_rates(cut, "p", SIZES))
    for batch in (32, 128, 512):
        split = [replace(SMALL, t=size, batch=batch) for size in SIZES]
        yield Reading(f"larger t, batch {batch}", "slower", _trend(split), note=_rates(split, "t", SIZES))


def microbatch_size(say: Say) -> Iterator[Reading]:
    """Figures 16 and 7: the best number of rows of a microbatch."""
    counts = (1, 2, 4, 8)
    for batch in (128, 512):
        jobs = [replace(WIDE, rows=rows, batch=batch) for rows in counts]
        best = max(jobs, key=lambda job: job.tflops)
        yield Reading(f"best b, batch {batch}", "2", str(best.rows), note=_rates(jobs, "b", counts))
    alone = [replace(ONE_GPU, rows=rows, batch=rows) for rows in (*counts, 16)]
    gain = max(job.tflops for job in alone) / alone[0].tflops
    yield Reading("best b over b = 1, one GPU", "1.3", gain, within=OF_A_MODEL, note=_rates(alone, "b", (*counts, 16)))


def interleaving(say: Say) -> Iterator[Reading]:
    """Figure 12: four chunks per stage against one."""
    gains = [interleaving_gain(batch, scattered=True) for batch in GPT_3_BATCHES]
    listed = ", ".join(f"{batch}: {gain:.2f}" for batch, gain in zip(GPT_3_BATCHES, gains, strict=True))
    yield Reading("v = 4 at all batch sizes", "faster", "faster" if min(gains) > 1 else "not at all", note=listed)
    closes = all(more > less for more, less in pairwise(gains))
    yield Reading("its gain with the batch size", "falls", "falls" if closes else "does not fall")
    for batch, published in ((GPT_3_BATCHES[0], "faster"), (LARGE_BATCH, "slower")):
        gain = interleaving_gain(batch, scattered=False)
        verdict = "faster" if gain > 1 else "slower"
        yield Reading(f"v = 4 without scatter/gather, batch {batch}", published, verdict, note=f"{gain:.2f}")


def interleaving_gain(batch: int, scattered: bool) -> float:
    """The rate of GPT-3 with four chunks per stage over that with one."""
    plain = replace(GPT_3, batch=batch, scattered=scattered)
    return replace(plain, chunks=GPT_3_CHUNKS).tflops / plain.tflops


def scatter_gather(say: Say) -> Iterator[Reading]:
    """Figure 18: messages of 1/t against whole ones, with four chunks per stage."""
    gains = []
    for batch in GPT_3_BATCHES:
        job = replace(GPT_3, batch=batch, chunks=GPT_3_CHUNKS)
        gains.append(job.tflops / replace(job, scattered=False).tflops)
    listed = ", ".join(f"{batch}: {gain:.3f}" for batch, gain in zip(GPT_3_BATCHES, gains, strict=True))
    yield Reading("with scatter/gather, up to", "1.11", max(gains), within=OF_A_GAIN, note=listed)


def _rates(jobs: Sequence[TrainingJob], letter: str, values: Sequence[int]) -> str:
    """The rates of some jobs as text."""
    listed = ", ".join(f"{value}: {job.tflops:.0f}" for value, job in zip(values, jobs, strict=True))
    return f"TFLOP/s by {letter}: {listed}"


def _trend(jobs: Sequence[TrainingJob]) -> str:
    """Whether each job is slower than the one before."""
    rates = [job.tflops for job in jobs]
    return "slower" if all(a > b for a, b in pairwise(rates)) else "not always"


_MODEL = (
    "Ours are a model, not a measurement: products in whole waves of tiles at 0.75 of the peak (assumed), other "
    "kernels and links at the planner's rates for A100 in DGX A100 (0.8 of the memory's, 0.75 of NVLink's and of eight "
    "200 Gb/s adapters per node), and the lists of actions that the engine executes, simulated with these times. A "
    "rank waits for its messages, as Megatron-LM's did; recomputation is on."
)
_SCRIPTS = "Microbatches and chunks are those of the paper's scripts (Megatron-LM, examples/sc21)."
_RATE = "TFLOP/s per GPU"
PTDP = (
    Claim(
        "ptdp-table-1",
        "throughput of GPTs from 1.7 B to 1 T parameters on 32 to 3072 GPUs",
        f"{PAPER}, table 1 (section 5.1)",
        _RATE,
        f"{_MODEL} {_SCRIPTS}",
        throughput,
    ),
    Claim(
        "ptdp-sizes",
        "parameters of the models of table 1",
        f"{PAPER}, table 1 and equation 2 (section 5.1)",
        "10^9 parameters",
        "Equation 2, from layers and width.",
        sizes,
    ),
    Claim(
        "ptdp-tensor-or-pipeline",
        "tensor parallelism up to the GPUs of a node, stages across nodes (takeaway 1)",
        f"{PAPER}, figure 13 (section 5.4.1); section 1 for the factor",
        "162 B parameters on 64 GPUs, t ranks in each layer and 64/t stages",
        _MODEL,
        tensor_or_stages,
    ),
    Claim(
        "ptdp-data-or-model",
        "as little model parallelism as fits, data parallelism for the rest (takeaway 2)",
        f"{PAPER}, figures 14 and 15 (sections 5.4.2 and 5.4.3)",
        "5.9 B parameters on 64 GPUs",
        _MODEL,
        data_or_model,
    ),
    Claim(
        "ptdp-microbatch",
        "the best microbatch lies between small products and a large bubble (takeaway 3)",
        f"{PAPER}, figure 16 (section 5.5), 91 B parameters on 64 GPUs, t = 8, p = 8; figure 7 (section 3.4)",
        "rows of a microbatch, and times the rate of one row",
        f"{_MODEL} Left out is figure 8, an estimate from times of one GPU with b = 4 as the best at two batch sizes: "
        "by our times of one GPU, which rise less with b, it would be 1 and 2.",
        microbatch_size,
    ),
    Claim(
        "ptdp-interleaving",
        "chunks shorten the bubble most where batches are small",
        f"{PAPER}, figure 12 (section 5.3.2)",
        "rate of GPT-3 on 96 GPUs (t = 8, p = 12) with v = 4, against v = 1",
        f"{_MODEL} {_SCRIPTS} For the last reading the paper says larger batch sizes, and names none.",
        interleaving,
    ),
    Claim(
        "ptdp-scatter-gather",
        "messages between stages carry 1/t of the activation",
        f"{PAPER}, figure 18 (section 5.7)",
        "times the rate without, GPT-3 on 96 GPUs (t = 8, p = 12, v = 4)",
        f"{_MODEL} {_SCRIPTS}",
        scatter_gather,
    ),
)


RANKS, LAYERS, TOKENS, WIDTH = (2, 8), (2, 3), 16, 128


def collectives(say: Say) -> Iterator[Reading]:
    """All-reduces of activations and their gradients in a block: the difference by one more block."""
    for ranks in RANKS:
        say(f"{ranks} ranks")
        few, more = (_calls(ranks, layers) for layers in LAYERS)
        yield Reading(f"{ranks} ranks: forward and backward", "4", float(more - few), exact=True)


def _calls(ranks: int, layers: int) -> int:
    plan = Plan(tensor_parallel=TensorParallel(ranks, sequence=False), transport="network")
    task = gpt_task(GPTConfig(vocabulary=1024, context=TOKENS, width=WIDTH, heads=8, layers=layers))
    _, _, calls = rehearse(task, plan, 0, ranks, 1).wire[Purpose.SUM_ACTIVATIONS]
    return int(calls)


MEGATRON = (
    Claim(
        "megatron-collectives",
        "all-reduces of a transformer block",
        "Megatron-LM, Shoeybi et al., 1909.08053, section 3",
        "all-reduces",
        "The engine is rehearsed with sequence parallelism off, and comm counts what it sends: two in the forward of a "
        "block, and two in its backward.",
        collectives,
    ),
)
