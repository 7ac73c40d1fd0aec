"""The settings of activations: recomputation, and compression of saved tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from zeroshard.errors import PlanError
from zeroshard.planning.foreign_names import explains_unknown
from zeroshard.planning.settings import check_choice, check_flag, names_of, shown

RECOMPUTE = ("schedule", "off", "blocks", "sqrt", "selective", "auto")
CLASSES = ("attention", "norms", "activations")  # of operations that "selective" may compute again
LOSSLESS = ("binarize", "sparse", "inplace")  # codes of `compress` that keep all bits
LOSSY = ("fp16", "fp10", "fp8", "e4m3", "int8", "int4", "int2")
RecomputeName = Literal["schedule", "off", "blocks", "sqrt", "selective", "auto"]


@explains_unknown
@dataclass(frozen=True, repr=False)
class Activations:
    """Recomputation (1604.06174; 2205.05198) and compression of tensors saved for the backward.

    Raises:
        PlanError: a value out of range, or two settings that do not combine.
    """

    recompute: RecomputeName = "schedule"
    """What a backward computes again: nothing ("off"), each block from its input ("blocks"; in a pipeline each chunk),
    about √l segments of the l blocks ("sqrt"), in each block what is cheap to compute ("selective"), or what makes it
    the fastest within device_memory ("auto"); "schedule" is "blocks" for "gpipe" and else "off"."""
    operations: tuple[str, ...] = CLASSES
    """Classes of operations that "selective" computes again: attention (products of activations, and softmax), norms,
    activations (activation functions). Products with weights are never computed again, nor classes left out."""
    save_sums: bool = True
    """With layers split by tensor parallelism, keep what the ranks summed and gathered in the forward, so that a
    recomputation sends nothing."""
    compress: tuple[str, ...] = ()
    """How saved tensors are compressed after their use in the forward (Gist, ISCA 2018). Without loss: "binarize" (a
    ReLU keeps 1 bit of an element, a max-pool 4), "sparse" (values that are not zero, with columns of a byte),
    "inplace" (a ReLU writes over an input that nothing else needs). And one for all other values, which changes
    gradients: "fp16", "fp10", "fp8", "e4m3" (with a scale for each 128 values), "int8", "int4" or "int2" (of 256
    values, rounded at random)."""

    partition: bool = False
    """P_a of ZeRO-R (1910.02054, section 6.1): with layers split by tensor parallelism without sequence parallelism, a
    rank keeps a part of the inputs of blocks, or of a pipeline's chunks, which are gathered for the recomputation; sums
    are made again there, so `save_sums` is of no effect."""

    arena: bool = False
    """M_D of ZeRO-R (1910.02054, section 6.3): the inputs of blocks that are computed again are copied into one buffer,
    and those of a pipeline's chunks arrive in it; its layout is planned from the first step, so that they leave no gaps
    between other tensors."""

    def __post_init__(self) -> None:
        check_choice("activations.recompute", self.recompute, RECOMPUTE)
        check_flag("activations.save_sums", self.save_sums)
        check_flag("activations.partition", self.partition)
        check_flag("activations.arena", self.arena)
        object.__setattr__(self, "operations", names_of("activations.operations", self.operations))
        for name in self.operations:
            check_choice("activations.operations", name, CLASSES)
        self._check_compress()
        if self.operations != CLASSES and self.recompute != "selective":
            raise PlanError(
                f"activations.operations={self.operations!r} is for recompute='selective', and recompute is "
                f"{self.recompute!r}. Set activations=Activations('selective', operations=...), or leave it out."
            )

    def recomputed(self, how: RecomputeName) -> "Activations":
        """The settings with a recomputation, or as they are where one is chosen already."""
        return replace(self, recompute=how) if self.recompute in ("schedule", "off") else self

    def refusals(self, budget: bool, name: str) -> Iterator[str]:
        """Sentences about settings that do not combine, with the way out.

        Args:
            budget: whether the device has one.
            name: by which the plan set `recompute`.
        """
        if self.recompute == "auto" and not budget:
            yield (
                f"{name}='auto' decides within device_memory, and that is not set. Set it, such as "
                f"device_memory='8GiB', or use {name}='off', 'blocks', 'sqrt' or 'selective'."
            )
        lossy = [code for code in self.compress if code in LOSSY]
        if self.recompute == "auto" and lossy:
            yield (
                f"{name}='auto' and activations.compress={lossy[0]!r} do not combine: times decide what is stored, so "
                f"runs would round other tensors. Use 'binarize', 'sparse' and 'inplace', or {name}='off', 'blocks', "
                f"'sqrt' or 'selective'."
            )

    def _check_compress(self) -> None:
        object.__setattr__(self, "compress", names_of("activations.compress", self.compress))
        for name in self.compress:
            check_choice("activations.compress", name, LOSSLESS + LOSSY)
        if len(codes := [name for name in self.compress if name in LOSSY]) > 1:
            raise PlanError(
                f"activations.compress has {codes[0]!r} and {codes[1]!r}, and a value gets one code; set one of them."
            )
        if "inplace" in self.compress and "binarize" not in self.compress:
            raise PlanError(
                f"activations.compress={self.compress!r} has 'inplace', which is for ReLUs that keep bits, and lacks "
                f"'binarize'. Add it, or set compress without 'inplace'."
            )

    def split_refusals(self, tensor_ranks: int, sequence: bool, stages: int, schedule: str) -> Iterator[str]:
        """Sentences about settings that do not combine with split layers, or not without, each with the way out."""
        if not self.partition:
            return
        if tensor_ranks == 1:
            yield (
                "activations.partition=True divides the inputs of blocks among tensor ranks, and tensor_parallel is 1. "
                "Set tensor_parallel=2 or more, or leave activations.partition out."
            )
        elif sequence:
            yield (
                "activations.partition=True and tensor_parallel.sequence=True do not combine: sequence parallelism has "
                "divided the inputs of blocks already. Leave activations.partition out, or set "
                "tensor_parallel.sequence=False."
            )
        if not self.from_inputs(stages) and not self.of_chunks(stages, schedule):
            yield (
                f"activations.partition=True divides the inputs of blocks that are computed again whole, and recompute="
                f"{self.recompute!r}{' with stages' if stages > 1 else ''} has none. Use recompute='blocks' or 'sqrt'; "
                f"or leave activations.partition out."
            )

    def arena_refusals(self, stages: int, schedule: str, streams: bool, offloads: bool) -> Iterator[str]:
        """Sentences about settings that do not combine with an arena of inputs of blocks, each with the way out."""
        if not self.arena:
            return
        if not self.from_inputs(stages) and not self.of_chunks(stages, schedule):
            yield (
                f"activations.arena=True has a buffer for the inputs of blocks that are computed again whole, and "
                f"recompute={self.recompute!r}{' with stages' if stages > 1 else ''} has none. Use recompute='blocks' "
                f"or 'sqrt', or leave activations.arena out."
            )
        if streams:
            yield (
                f"activations.arena=True and pipeline_parallel.schedule={schedule!r} do not combine: steps overlap "
                f"there, and a layout is planned for one step. Leave activations.arena out, or use a schedule that "
                f"flushes, such as '1f1b'."
            )
        if offloads:
            yield (
                "activations.arena=True and offload='activations' do not combine: the inputs of blocks are on the host "
                "then. Leave one of them out."
            )

    @property
    def copies_ahead(self) -> int:
        """The number of concurrent copies to the host; with "auto" about as many as a whole block saves."""
        return 8 if self.recompute == "auto" else 2

    def from_inputs(self, stages: int) -> bool:
        """Whether backwards compute whole blocks, or segments of them, again from their inputs."""
        return self.recompute in ("blocks", "sqrt") and self.of_blocks(stages)

    def of_chunks(self, stages: int, schedule: str) -> bool:
        """Whether backwards compute the whole forward of their chunk of a pipeline again."""
        return stages > 1 and (self.recompute == "blocks" or (self.recompute == "schedule" and schedule == "gpipe"))

    def of_blocks(self, stages: int) -> bool:
        """Whether backwards compute blocks again, by themselves or in segments."""
        return self.recompute in ("sqrt", "selective", "auto") or (self.recompute == "blocks" and stages == 1)

    def __repr__(self) -> str:
        return shown(self)
