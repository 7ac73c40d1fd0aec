"""Whole weights of an engine, one tensor at a time on all ranks: `engine.weights()` and `engine.export()`.

[Note: one walk] Each rank holds boxes of some tensors. A table of all boxes is agreed on first; then all ranks walk it
in one order. Before each tensor the ranks agree that all go on, so a rank that does something else, or whose disk is
full, is an error on all of them and no hang. Between two tensors there is no state besides the table.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.boxes import Box, BoxValues
from zeroshard.checkpoint.disk import CheckpointDisk
from zeroshard.checkpoint.export import (
    CONFIG,
    ExportPlan,
    config_of_diffusers,
    converted,
    folder_of,
    narrowed,
    plan_export,
    refuse_existing,
    texts_of,
    write_export,
)
from zeroshard.checkpoint.file_names import FAMILY, FileGroup, Names, further_names, grouped, kept_names, renamed
from zeroshard.checkpoint.stream import Slot
from zeroshard.comm.collectives import Comm
from zeroshard.errors import CheckpointError, CommError, ConfigError, PlanError
from zeroshard.parts.part import Part, Parts
from zeroshard.pipeline.buffers import Buffers
from zeroshard.precision.cast import floating_dtype
from zeroshard.quantized.weights import end_of, take_apart
from zeroshard.text import shard_bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of one dtype in one flat tensor.

    Attributes:
        flat: all values [N], one tensor after the other.
        tensors: by name, each tensor in its shape, as a view of `flat`.
    """

    flat: Tensor
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """A tensor of the model, with the boxes that ranks hold of it.

    Attributes:
        kept: dtype of the values that updates change: the fp32 masters, where there are any.
        computed: dtype in which the model computes with it.
        boxes: by rank, in rank order; each element is in one of them.
    """

    name: str
    shape: tuple[int, ...]
    kept: torch.dtype
    computed: torch.dtype
    boxes: tuple[tuple[int, tuple[Box, ...]], ...]


class WholeWeights:
    """Assembles parameters and persistent buffers of all ranks into whole tensors; making one is a collective call.

    Args:
        tied: for parameters with several names, each further name and the first, under which the tensor is given.
        steps: the number of steps taken.

    Attributes:
        tied: as given.
        table: all tensors in the order of the model's state dict, the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        buffers: Buffers,
        tied: Mapping[str, str],
        world: Comm,
        steps: Callable[[], int],
    ) -> None:
        self._model, self.tied, self._world, self._parts = model, tied, world, parts
        self._steps, self._first_step = steps, steps()
        self._entries = {
            entry.name: (part, number) for part in parts.all for number, entry in enumerate(part.flat.index.entries)
        }
        self._buffers = {piece.name.partition(":")[2]: piece.values for piece in buffers.pieces()}
        self._fetched: tuple[Part | None, Tensor] = (None, torch.empty(0))
        mine: dict[str, Any] = {}
        for name, (part, number) in self._entries.items():
            values = part.updater.values
            boxes = [_plain(box) for box, _ in self._own(part, number, values.to("meta"))]
            mine[name] = [list(part.whole_shape(number)), [str(values.dtype), str(part.flat.dtype)], boxes]
        for name, buffer in self._buffers.items():
            mine[name] = [list(buffer.shape), [str(buffer.dtype)] * 2, [_plain(Box.whole(tuple(buffer.shape)))]]
        order = _names(model) if world.mesh.rank == 0 else []
        everyone = world.agree_on([order, mine], "the table of whole weights")
        names = dict.fromkeys(chain(everyone[0][0], *(theirs for _, theirs in everyone)))  # also old ones of a change
        self.table = [_held(name, [theirs.get(name) for _, theirs in everyone]) for name in names]
        self.table = [held for held in self.table if held.boxes or not math.prod(held.shape)]
        self._by_name = {held.name: held for held in self.table}
        self._quantised = {weight.label: weight for weight in take_apart(model)}
        self.table = list(self._dequantised())

    def groups(self, dtype: torch.dtype | str | None, names: Names, masters: bool) -> list[FileGroup]:
        """All tensors under their names in files.

        Args:
            dtype: of floating-point tensors; by default each tensor's own.
            names: as of `grouped`.
            masters: whether a tensor's own dtype is the one of its fp32 master weights, where there are any.

        Raises:
            ConfigError: `names` does not fit, or `dtype` is none of floating-point numbers.
        """
        kind, slots = floating_dtype(dtype), {}
        for held in self.table:
            own = held.kept if masters else held.computed
            slots[held.name] = Slot(held.name, kind if kind is not None and own.is_floating_point else own, held.shape)
        if names == FAMILY:
            kept = kept_names(self.tied, self._model)
            slots = {name: replace(slot, key=kept.get(name, name)) for name, slot in slots.items()}
            further = further_names(self.tied, self._model).items()
            slots |= {name: replace(slots[first], key=name) for name, first in further if first in slots}
        return grouped(list(slots.values()), names, self._model)

    def walk(
        self, groups: Sequence[FileGroup], read: Callable[[Slot], Tensor] | None = None
    ) -> Iterator[tuple[Slot, Tensor]]:
        """The tensors of each group in turn, on this rank's device; each step is a collective call ([Note: one walk]).

        Args:
            read: makes a source of a group; by default `read`.

        Raises:
            CheckpointError: another rank stopped with this error. CommError: another rank does something else.
            PlanError: a step was taken since the begin.
        """
        yield from converted(groups, self.read if read is None else read, self._go_on)
        self._fetched = (None, torch.empty(0))

    def read(self, slot: Slot) -> Tensor:
        """A whole tensor of the table in the dtype of `slot`, dequantised; a collective call."""
        name = self.tied.get(slot.key, slot.key)
        weight = self._quantised.get(name)
        if weight is None:
            return self._assembled(self._by_name[name], slot.dtype)
        held = {end: self._by_name[end_of(weight.label, end)] for end in weight.ends}
        tensors = {end: self._assembled(each, each.computed) for end, each in held.items()}
        return weight.dequantised(tensors).to(slot.dtype).contiguous()

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor as it is kept, codes of quantised weights too, by its first name; each step as of `walk`."""
        for number, held in enumerate(self._by_name.values()):
            self._go_on(number)
            yield held.name, self._assembled(held, held.kept)
        self._fetched = (None, torch.empty(0))

    def _dequantised(self) -> Iterator[HeldBoxes]:
        """The table with each quantised weight, in the dtype and shape before, in the place of its codes."""
        firsts = {end_of(weight.label, weight.ends[0]): weight for weight in self._quantised.values()}
        others = {end_of(weight.label, end) for weight in self._quantised.values() for end in weight.ends[1:]}
        for held in self.table:
            weight = firsts.get(held.name)
            if weight is not None:
                shape, dtype = weight.described
                whole = (held.shape[0], *shape[1:]) if len(shape) == 3 else tuple(shape)  # a stack's, of all ranks
                yield HeldBoxes(weight.label, whole, dtype, dtype, held.boxes)
            elif held.name not in others:
                yield held

    def named(self, groups: Sequence[FileGroup]) -> Iterator[tuple[str, Tensor]]:
        """As `walk`, each tensor with its name alone."""
        for slot, tensor in self.walk(groups):
            yield slot.key, tensor
            del tensor  # before the next is made

    def walk_buckets(self, groups: Sequence[FileGroup], most: int) -> Iterator[Bucket]:
        """As `walk`, with tensors of one dtype packed into at most `most` bytes; a larger one has its own bucket."""
        waiting = [slot for group in groups for slot in group.results]
        tensors = self.walk(groups)
        while waiting:
            slots = packed(waiting, most)
            waiting = waiting[len(slots) :]
            flat = torch.empty(
                sum(math.prod(slot.shape) for slot in slots), dtype=slots[0].dtype, device=self._world.mesh.device
            )
            views, at = {}, 0
            for slot in slots:
                views[slot.key] = flat[at : at + math.prod(slot.shape)].view(slot.shape)
                at += math.prod(slot.shape)
                views[slot.key].copy_(next(tensors)[1])
            yield Bucket(flat, views)
            del flat, views

    def export(self, out: Path, dtype: torch.dtype | str | None, shard_size: str | int) -> None:
        """Write a folder as `from_pretrained` reads it: rank 0 writes, one tensor at a time; a collective call.

        Args:
            dtype: of floating-point tensors; by default as kept: the fp32 masters, where there are any.

        Raises:
            CheckpointError: on all ranks, if the folder exists or cannot be written, or a value does not fit the dtype.
            ConfigError: `shard_size` is no size.
        """
        most = shard_bytes(shard_size, "shard_size")
        texts, tied = texts_of(self._model), self.tied
        groups = self.groups(dtype, None if texts[CONFIG] is None else FAMILY, masters=True)
        if texts[CONFIG] is None:  # all names of the state dict
            texts[CONFIG] = config_of_diffusers(self._model)
            by_name = {group.sources[0].key: group.sources[0] for group in groups}
            groups += [renamed(by_name[first], name) for name, first in tied.items() if first in by_name]
        wide = {held.name for held in self.table if held.kept != torch.float16}
        wide |= {name for name, first in tied.items() if first in wide}
        self.write(out, plan_export(groups, most, texts, folder_of(self._model), narrowed(groups, wide)))

    def write(self, out: Path, plan: ExportPlan, read: Callable[[Slot], Tensor] | None = None) -> None:
        """Write the files of a plan on rank 0, one tensor at a time; a collective call.

        Args:
            read: as of `walk`.

        Raises:
            CheckpointError: on all ranks, as `export`.
        """
        problem, values = None, self.walk(plan.groups, read)
        if self._world.mesh.rank == 0:
            try:
                refuse_existing(out)
                write_export(plan, values, out, CheckpointDisk())
            except (CheckpointError, ConfigError) as error:
                problem = str(error)
        else:
            for _ in values:
                pass
        self._agree(len(plan.groups), problem)

    def _go_on(self, number: int) -> None:
        """Begin with the tensors of a group; a collective call."""
        if self._steps() != self._first_step:
            raise PlanError(
                f"Whole weights of step {self._first_step} were asked for after step {self._steps()}, and they are "
                f"read from the engine one by one. Take all of them between two steps."
            )
        self._agree(number, None)

    def _agree(self, number: int, problem: str | None) -> None:
        """Agree that all ranks are at the same group, and none has a problem; a collective call.

        Raises:
            CheckpointError: one has, on all ranks alike. CommError: another rank does something else.
        """
        try:
            everyone = self._world.agree_on([number, problem], "whole weights, a tensor at a time")
        except CommError as error:
            raise CommError(f"{error} A loop over engine.weights() ends at the same tensor on all ranks.") from error
        for rank, (_, found) in enumerate(everyone):
            if found is not None:
                raise CheckpointError(found if rank == self._world.mesh.rank else f"Rank {rank}: {found}")
        for rank, (other, _) in enumerate(everyone):
            if other != number:
                raise CommError(
                    f"Rank {self._world.mesh.rank} takes out tensor {number} of engine.weights() or engine.export(), "
                    f"and rank {rank} tensor {other}. All ranks must walk all tensors in the same order: let no rank "
                    f"leave the loop earlier than the others."
                )

    def _assembled(self, held: HeldBoxes, dtype: torch.dtype) -> Tensor:
        """A whole tensor from the boxes of all ranks."""
        device = self._world.mesh.device
        whole, all_of_it = torch.empty(held.shape, dtype=dtype, device=device), Box.whole(held.shape)
        for box, values in self._own_values(held.name, dtype):
            whole[box.slices(all_of_it)].copy_(values)
        if self._world.mesh.ranks == 1:
            return whole
        for rank, boxes in held.boxes:
            for start, stop, apart in _runs(boxes, all_of_it):
                if apart is None:
                    self._world.broadcast(whole.view(-1)[start:stop], f"whole {held.name}", rank)
                    continue
                there = whole[apart.slices(all_of_it)]
                values = there.contiguous()
                self._world.broadcast(values, f"whole {held.name}", rank)
                there.copy_(values)
        return whole

    def _own_values(self, name: str, dtype: torch.dtype) -> Iterator[BoxValues]:
        """This rank's boxes of a tensor."""
        if name in self._entries:
            part, number = self._entries[name]
            yield from self._own(part, number, self._values(part, dtype))
        elif name in self._buffers:
            yield BoxValues(Box.whole(tuple(self._buffers[name].shape)), self._buffers[name])

    def _values(self, part: Part, dtype: torch.dtype) -> Tensor:
        """The values of a part on this rank; of one on a disk, or in fewer bits, a copy that is kept until the next."""
        if part.updater.as_saved:
            return part.updater.values
        if self._fetched[0] is not part or self._fetched[1].dtype != dtype:
            self._fetched = (None, torch.empty(0))  # before the next is read
            with part.updater.at_hand():
                self._fetched = part, part.updater.values.to(dtype, copy=True)
        return self._fetched[1]

    def _own(self, part: Part, number: int, values: Tensor) -> Iterator[BoxValues]:
        """The boxes of one parameter that this rank counts, as views of the part's values."""
        entry, updater = part.flat.index.entries[number], part.updater
        first, last = part.flat.index.interval(part.weights.rank)
        low, high = max(first, entry.offset), min(last, entry.stop)
        if part.place.counted and low < high:
            inside = values[low - updater.start : high - updater.start]
            yield from (each for each, counted in part.boxes(number, low, inside) if counted)


def packed(slots: Sequence[Slot], most: int) -> list[Slot]:
    """The first slots of one dtype that have at most so many bytes together; at least one."""
    found, nbytes = [slots[0]], slots[0].nbytes
    for slot in slots[1:]:
        nbytes += slot.nbytes
        if nbytes > most or slot.dtype != slots[0].dtype:
            break
        found.append(slot)
    return found


def _names(model: nn.Module) -> list[str]:
    """Names of parameters and buffers, in the order of a state dict."""
    modules = list(model.named_modules())
    return [f"{path}.{name}" if path else name for path, m in modules for name in (*m._parameters, *m._buffers)]


def _plain(box: Box) -> list[list[int]]:
    return [list(box.start), list(box.shape)]


def _held(name: str, by_rank: Sequence[Any]) -> HeldBoxes:
    """A row of the table, from those of all ranks; of a buffer, the copy of the first rank that has one."""
    present = {rank: row for rank, row in enumerate(by_rank) if row is not None}
    if not present:
        return HeldBoxes(name, (1,), torch.uint8, torch.uint8, ())  # a module's name for something without values
    shape, dtypes, _ = next(iter(present.values()))
    boxes = {rank: tuple(Box(tuple(start), tuple(size)) for start, size in row[2]) for rank, row in present.items()}
    holders = [(rank, found) for rank, found in boxes.items() if found]
    if sum(box.numel for _, found in holders for box in found) > math.prod(shape):
        holders = holders[:1]
    kept, computed = (getattr(torch, dtype.removeprefix("torch.")) for dtype in dtypes)
    return HeldBoxes(name, tuple(shape), kept, computed, tuple(holders))


def _runs(boxes: Sequence[Box], whole: Box) -> list[tuple[int, int, Box | None]]:
    """Boxes as runs [start, stop) of the flattened tensor, adjacent ones joined; those that are none with their box."""
    found: list[tuple[int, int, Box | None]] = []
    for each in boxes:
        if not each.numel:
            continue
        start, stop = (each.offset(whole), each.end(whole)) if whole.shape else (0, 1)
        if stop - start != each.numel:
            found.append((start, stop, each))
        elif found and found[-1][1] == start and found[-1][2] is None:
            found[-1] = found[-1][0], stop, None
        else:
            found.append((start, stop, None))
    return found
