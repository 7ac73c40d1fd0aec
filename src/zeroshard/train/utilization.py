"""Use of the devices by a run: model FLOPs per second of a rank, and their share of the device's peak rate (MFU).

Model FLOPs are those that a step needs however it is run (PaLM, 2204.02311, appendix B): recomputation does not count.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from zeroshard.errors import ZeroshardError
from zeroshard.planner.predict.adapters import put_adapters
from zeroshard.planner.predict.model_flops import sequence_flops
from zeroshard.planner.predict.torch_internals import fakes
from zeroshard.planner.search.this_machine import ASSUMED, local_machines
from zeroshard.planning.adapters import Adapters
from zeroshard.train.config import TrainConfig
from zeroshard.train.model import BuiltModel, build_model
from zeroshard.train.model_shape import shape_of

TOLERANCE = 0.01  # difference between a formula's parameters and a model's, of mixtures put into it among others


@dataclass(frozen=True, slots=True)
class Utilization:
    """Model FLOPs of a token and the peak rate of a device; None for unknown numbers.

    Attributes:
        whole: FLOPs of a token's forward and backward, with each square of attention whole.
        causal: the same with half of each square.
        peak: FLOP/s of one rank's device in the dtype of the run.
    """

    whole: float | None
    causal: float | None
    peak: float | None

    def of(self, tokens_per_s: float, ranks: int) -> dict[str, float]:
        """Model TFLOP/s of one rank and its MFU, at so many tokens per second of all ranks; without unknown numbers."""
        if self.whole is None:
            return {}
        rate = self.whole * tokens_per_s / ranks
        return {"tflops_per_rank": rate / 1e12, **({} if self.peak is None else {"mfu": rate / self.peak})}


class Speed:
    """The speed of a run, step by step.

    Args:
        ranks: all of the job.
    """

    def __init__(self, utilization: Utilization, ranks: int) -> None:
        self._utilization, self._ranks = utilization, ranks
        self._rates: list[float] = []
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def least_seconds(self, tokens: int) -> float | None:
        """Seconds of a step of so many tokens of all ranks at the devices' full rate; None where it is not known."""
        used = self._utilization
        return None if used.whole is None or used.peak is None else used.whole * tokens / self._ranks / used.peak

    def step(self, tokens: int, seconds: float) -> dict[str, float]:
        """The metrics of a step that took so many tokens of all ranks."""
        rate = tokens / seconds
        self._rates.append(rate)
        return {"tokens_per_s": rate, **self._utilization.of(rate, self._ranks)}

    def summary(self) -> dict[str, float | None]:
        """All figures at the median speed; None for unknown ones."""
        used = self._utilization
        rate = median(self._rates) if self._rates else None
        found: Mapping[str, float] = {} if rate is None else used.of(rate, self._ranks)
        mfu = found.get("mfu")
        causal = None if mfu is None or not used.whole or used.causal is None else mfu * used.causal / used.whole
        return {
            "tokens_per_s": rate,
            "tokens_per_s_per_rank": None if rate is None else rate / self._ranks,
            "flops_per_token": used.whole,
            "flops_per_token_causal": used.causal,
            "peak_flops": used.peak,
            "tflops_per_rank": found.get("tflops_per_rank"),
            "mfu": mfu,
            "mfu_causal": causal,
        }


def utilization_of(config: TrainConfig, built: BuiltModel, device: torch.device, ranks: int) -> Utilization:
    """The utilization of a run: by the formula of the model's shape where it is known, else counted on the model."""
    length = config.sequence
    shape = shape_of(config.model)
    try:
        if config.adapted is not None:
            module = _beside_adapters(config, config.adapted)
            whole, causal = sequence_flops(module, lambda n: built.batch(_tokens(n)), length)
        elif shape is None or not math.isclose(shape.parameters, built.parameters, rel_tol=TOLERANCE):
            whole, causal = sequence_flops(built.module, lambda n: built.batch(_tokens(n)), length)
        else:
            whole, causal = shape.row_flops(length)
    except ZeroshardError:  # a model that cannot be copied, or whose forward depends on values
        return Utilization(None, None, None)
    return Utilization(whole / length, causal / length, _peak(config.plan.precision, device, ranks))


def _beside_adapters(config: TrainConfig, adapters: Adapters) -> nn.Module:
    """The frozen model of a run with stand-ins of its adapters, which count alike for weights of any dtype."""
    with fakes():
        return put_adapters(build_model(config.model, 0, config.sequence).module, adapters)


def _tokens(length: int) -> torch.Tensor:
    return torch.zeros(1, length + 1, dtype=torch.long, device="meta")


def _peak(precision: str, device: torch.device, ranks: int) -> float | None:
    """The rate of a device by its sheet or by `zeroshard doctor`; None where it is only assumed."""
    try:
        one = local_machines(ranks, device.type).device
    except ZeroshardError:  # a device without a name, or a profile that cannot be read
        return None
    if one.source == ASSUMED:
        return None
    return one.matrix_flops.get(precision, one.matrix_flops["fp32"]) / one.peak_share
