"""The plan: everything that decides how a model is trained, in one frozen, validated object."""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from zeroshard.errors import PlanError

UNITS_OF_SIZE = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

POSITIVE = (
    *(f"loss_scale_{part}" for part in ("initial", "growth", "backoff", "window", "hysteresis", "floor")),
    *("accumulate", "timeout", "clip_norm", "loss_scale"),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train: what each rank keeps, in which precision, and what a step is.

    Raises:
        PlanError: a value out of range, or two settings that do not combine, with the way out.
    """

    zero: Literal[0, 1, 2, 3] = 2
    """ZeRO stage: 0 keeps everything on every rank, 1 slices optimizer states, 2 gradients too, 3 parameters too."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of computation. fp32 leaves the model's dtypes alone; 16-bit parameters always have fp32 master weights."""
    fp32_modules: tuple[str, ...] = ()
    """Classes or paths of modules that compute in fp32 under bf16 or fp16."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of gradients on the wire; by default their own, which loses nothing. Sums are always made in fp32."""
    loss_scale: float | Literal["auto", "dynamic", "off"] = "auto"
    """A fixed loss scale, "dynamic", or "off"; "auto" is dynamic for fp16 and off otherwise."""
    loss_scale_initial: float = 65536.0
    """First value of a dynamic loss scale."""
    loss_scale_growth: float = 2.0
    """Factor on the dynamic loss scale after a window of good steps."""
    loss_scale_backoff: float = 0.5
    """Factor on the dynamic loss scale after an overflow."""
    loss_scale_window: int = 2000
    """Good steps before the dynamic loss scale grows."""
    loss_scale_hysteresis: int = 1
    """Overflows that the dynamic loss scale bears before it backs off."""
    loss_scale_floor: float = 1.0
    """Lowest dynamic loss scale; an overflow there is an error."""
    accumulate: int = 1
    """Microbatches per step of `train_step`."""
    reduce_every: Literal["auto", "microbatch", "step"] = "auto"
    """When gradients are reduced: after each microbatch, or once a step after adding up locally (less on the wire,
    whole gradients kept meanwhile). "auto": once a step at stage 0, else after each microbatch, so that stages 1 to 3
    add in the
    same order and agree bit for bit."""
    clip_norm: float | None = None
    """Largest 2-norm of the whole gradient; longer ones are scaled down to it."""
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    """What a step does with NaN or infinite gradients when no loss scaling is on."""
    units: tuple[str, ...] | None = None
    """Classes or paths of the modules that are units; by default the repeated blocks, () for one unit in all."""
    seed: int = 0
    """Seed of the initial weights of a model on the meta device."""
    device_memory: str | int | None = None
    """Budget for all that the ledger counts on the device, in bytes or like "512MiB"."""
    timeout: float = 300.0
    """Seconds that a collective may wait before it is an error."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_ranges()
        if self.precision == "fp16" and self.loss_scale == "off" and self.nonfinite == "raise":
            raise PlanError(
                "precision='fp16' with loss_scale='off' loses small gradients silently. Use loss_scale='dynamic', "
                "precision='bf16', or nonfinite='skip' to say that you mean it."
            )
        if self.accumulate == 1 and self.reduce_every == "step" and self.zero >= 2:
            raise PlanError(
                f"reduce_every='step' with accumulate=1 has no effect at zero={self.zero}; set accumulate to 2 or "
                f"more, "
                "or leave reduce_every='auto'."
            )

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether `train_step` reduces after every microbatch."""
        return self.zero >= 1 if self.reduce_every == "auto" else self.reduce_every == "microbatch"

    @property
    def reductions(self) -> int:
        """Reductions of the gradients per `train_step`."""
        return self.accumulate if self.reduces_each_microbatch else 1

    @property
    def scales_loss(self) -> bool:
        """Whether a loss scale is in use."""
        return self.precision == "fp16" if self.loss_scale == "auto" else self.loss_scale != "off"

    @property
    def device_budget(self) -> int | None:
        """The device's budget in bytes, or None."""
        return None if self.device_memory is None else parse_bytes(self.device_memory)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and TOML hold them."""
        return dataclasses.asdict(self)

    def _check_choices(self) -> None:
        choices = {
            "zero": (0, 1, 2, 3),
            "precision": ("fp32", "bf16", "fp16"),
            "reduce_dtype": (None, "fp32", "bf16", "fp16"),
            "reduce_every": ("auto", "microbatch", "step"),
            "nonfinite": ("raise", "skip", "ignore"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed or isinstance(value, bool):
                raise PlanError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")
        if isinstance(self.loss_scale, str) and self.loss_scale not in ("auto", "dynamic", "off"):
            raise PlanError(f"loss_scale is {self.loss_scale!r}; it must be a number, 'auto', 'dynamic' or 'off'.")
        for name in ("units", "fp32_modules"):
            value = getattr(self, name)
            if value is None and name == "units":
                continue
            if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(v, str) for v in value):
                raise PlanError(f"{name} is {value!r}; it must be a tuple of names, such as ('Block',).")
            object.__setattr__(self, name, tuple(value))

    def _check_ranges(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            if (name == "clip_norm" and value is None) or (name == "loss_scale" and isinstance(value, str)):
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise PlanError(f"{name} is {value!r}; it must be a number that is more than 0 and finite.")
        for name in ("accumulate", "loss_scale_window", "loss_scale_hysteresis", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise PlanError(f"{name} is {value!r}; it must be a whole number.")
        if self.loss_scale_growth < 1 or self.loss_scale_backoff > 1:
            raise PlanError(
                f"loss_scale_growth is {self.loss_scale_growth} and loss_scale_backoff {self.loss_scale_backoff}; "
                "growth must be at least 1 and backoff in (0, 1]."
            )
        if self.device_memory is not None:
            try:
                parse_bytes(self.device_memory)
            except PlanError as error:
                raise PlanError(f"device_memory: {error}") from None


def parse_bytes(size: str | int) -> int:
    """Bytes from a number or a text such as "512MiB" or "1.5 GB".

    Raises:
        PlanError: not a size.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMG]i?B|B|)\s*", str(size))
    try:
        return int(Fraction(match.group(1)) * UNITS_OF_SIZE[match.group(2)]) if match else int("")
    except ValueError:
        raise PlanError(f"{size!r} is no size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB.") from None
