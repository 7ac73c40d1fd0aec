"""Predictors of the peak of a run, ours and others, each called by its own interface."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from estimates.runs import ROWS, TOKENS, Run, loop, mesh_of, plain, sharded

Claim = Literal["peak", "states"]


class NotApplicable(Exception):
    """The predictor does not apply to such a run."""


@dataclass(frozen=True)
class Predictor:
    """One predictor of the peak of memory.

    Attributes:
        says: the meaning of its number, in words.
        claim: the measured figure to compare it with: the whole peak, or the model states alone.
        ask: bytes of each rank, first to last; one number stands for all.
    """

    name: str
    says: str
    claim: Claim
    ask: Callable[[Run], list[int]]


def zeroshard_fake(run: Run) -> list[int]:
    """The engine of each rank on tensors without values."""
    return [rehearsed(run, rank, run.shape[3], real=False) for rank in range(run.ranks)]


def zeroshard_shallow(run: Run) -> list[int]:
    """The engine on real tensors with two and with three layers, and as much for every further layer."""
    if run.model == "gpt" or run.engine != "zeroshard":
        raise NotApplicable("our own models are exact without values")
    two, three = (rehearsed(run, 0, layers, real=True) for layers in (2, 3))
    return [two + (three - two) * (run.shape[3] - 2)]


def rehearsed(run: Run, rank: int, layers: int, real: bool) -> int:
    """The peak of one rank in a rehearsal of our engine."""
    from zeroshard.planner.predict.rehearse import TrainingTask, rehearse

    if run.engine != "zeroshard":
        raise NotApplicable("it is another engine")
    few = replace(run, shape=(*run.shape[:3], layers))
    task = TrainingTask(few.build, few.batch, few.optimizer_of, rows=ROWS * few.ranks)
    return rehearse(task, few.zeroshard_plan(), rank, few.ranks, ROWS, timed=real).peak_bytes


def mem_tracker(run: Run) -> list[int]:
    """torch's MemTracker around the plain loop, on tensors without values."""
    from torch.distributed._tools.mem_tracker import MemTracker

    if run.engine != "plain":
        raise NotApplicable("it follows one process")
    with _fakes():
        tracker = MemTracker()
        with tracker:
            step, _ = plain(run)
            step()
            tracker.reset_mod_stats()  # it follows one step at a time
            step()
        return [_peak(tracker)]


def fsdp_mem_tracker(run: Run) -> list[int]:
    """torch's FSDPMemTracker around FSDP2, on tensors without values and with a process group of one's own.

    It takes the sharded model and its optimizer, so it does not see their construction, only the bytes that they hold.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if run.engine != "fsdp2":
        raise NotApplicable("it follows FSDP2 alone")
    torch.distributed.init_process_group("fake", rank=0, world_size=run.ranks, store=FakeStore())
    try:
        mesh = mesh_of(run)  # it reads values, so it is made of real tensors
        with _fakes():
            model = sharded(run, mesh)
            made: list[torch.optim.Optimizer] = []
            step, _ = loop(_Keeping(run, made), model, False)  # type: ignore[arg-type]
            tracker = FSDPMemTracker(model, made[0])
            with tracker:
                step()
                tracker.reset_mod_stats()
                step()
            return [_peak(tracker)]
    finally:
        torch.distributed.destroy_process_group()


class _Keeping:
    """A run that keeps the optimizer that it makes."""

    def __init__(self, run: Run, made: list[torch.optim.Optimizer]) -> None:
        self._run, self._made = run, made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def optimizer_of(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer, kept."""
        self._made.append(self._run.optimizer_of(parameters))
        return self._made[-1]


def megatron(run: Run) -> list[int]:
    """Megatron's way: states by bytes per parameter, activations by table 2 of Korthikanti et al., 2205.05198.

    Per parameter 2 of weights, 4 of fp32 gradients and 12 of masters and moments, the last over all ranks where the
    optimizer is sliced. Per layer 34sbh where attention keeps no scores, 2sbh where all is computed again; beside the
    layers sbh of the embedding's dropout and 4sbh(1 + v/h) of the last norm, the output layer and the fp32 logits.
    """
    plan = run.plan
    if run.precision != "bf16" or run.model not in ("gpt", "gpt2") or run.optimizer != "adamw":
        raise NotApplicable("the formulas are for 16-bit GPTs under Adam")
    if run.engine != "zeroshard" or (plan["zero"] > 1 and run.ranks > 1) or plan.get("pipeline_parallel", 1) > 1:
        raise NotApplicable("there is no formula for these slices")
    vocabulary, width, _, layers = run.shape
    each = 6 + 12 / run.ranks if plan["zero"] == 1 else 18
    sbh = TOKENS * (ROWS // plan.get("microbatches", 1)) * width
    activations = sbh * layers * (2 if run.recompute else 34) + sbh + 4 * sbh * (1 + vocabulary / width)
    return [round(each * sizes(run)[0] + activations)]


def accelerate(run: Run) -> list[int]:
    """`accelerate estimate-memory`, the row "training using Adam", without the Hub: its functions on the model itself.

    The command makes the model from the Hub's configuration and calls these two; it prints the largest of the parts.
    """
    try:
        from accelerate.commands.estimate import estimate_training_usage  # type: ignore[import-untyped]
        from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]
    except ImportError as error:
        raise NotApplicable("accelerate is not installed") from error

    if run.engine not in ("plain", "ddp", "zeroshard") or (run.plan.get("zero", 0) > 0 and run.ranks > 1):
        raise NotApplicable("it knows no slices")
    with torch.device("meta"):
        model: Any = run.build()
    model.tie_weights = getattr(model, "tie_weights", lambda: None)  # it asks every model for this
    total, _ = calculate_maximum_sizes(model)
    dtype = "float32" if run.precision == "fp32" else "bfloat16"
    return [round(max(estimate_training_usage(total, dtype).values()))]


def sizes(run: Run) -> tuple[int, int]:
    """Parameters in all, and of the module that has most of its own."""
    with torch.device("meta"):
        model = run.build()
    own = (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(p.numel() for p in model.parameters()), max(own)


def deepspeed_formula(run: Run, parameters: int, largest: int) -> list[int]:
    """`estimate_zero2_model_states_mem_needs` and its like for stage 3; runs where DeepSpeed is installed."""
    stage = run.plan["zero"]
    if stage == 2:
        from deepspeed.runtime.zero.stage_1_and_2 import (  # type: ignore[import-not-found]
            estimate_zero2_model_states_mem_needs as estimate2,
        )

        return [estimate2(parameters, run.ranks, 1, cpu_offload=False)[1]]
    from deepspeed.runtime.zero.stage3 import (  # type: ignore[import-not-found]
        estimate_zero3_model_states_mem_needs as estimate3,
    )

    return [estimate3(parameters, largest, run.ranks, 1, cpu_offload=False, cpu_offload_params=False)[1]]


PREDICTORS = {
    predictor.name: predictor
    for predictor in (
        Predictor("zeroshard, fake", "the peak of each rank", "peak", zeroshard_fake),
        Predictor("zeroshard, shallow-real", "the peak of each rank", "peak", zeroshard_shallow),
        Predictor("MemTracker", "the peak of one process", "peak", mem_tracker),
        Predictor("FSDPMemTracker", "the peak of a rank of FSDP2", "peak", fsdp_mem_tracker),
        Predictor("Megatron's formulas", "states and activations, no temporaries", "peak", megatron),
        Predictor("accelerate", "to train with Adam, no activations", "states", accelerate),
    )
}
DEEPSPEED = Predictor("DeepSpeed's estimate", "model states under Adam in 16 bits", "states", lambda run: [])


@contextlib.contextmanager
def _fakes() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _peak(tracker: Any) -> int:
    snapshot = tracker.get_tracker_snapshot("peak")
    total: int = sum(parts["Total"] for device, parts in snapshot.items() if device.type != "meta")
    return total
