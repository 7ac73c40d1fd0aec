"""Weights, optimizer states, buffers and random numbers as the logical tensors of a checkpoint, and back."""

import json
import math
import time
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from zeroshard.access.adapter_export import adapter_facts
from zeroshard.access.editing import WholeTensors
from zeroshard.access.frozen_base import FrozenBase, check_base, merged_facts, without
from zeroshard.access.given import GivenWeights, LoadedKeys, check_same, shared
from zeroshard.access.unfreezing import warn_of_dropped
from zeroshard.access.whole_weights import WholeWeights
from zeroshard.checkpoint import (
    BaseFiles,
    Box,
    Fetched,
    LoadReport,
    Meeting,
    Notes,
    Reader,
    Saving,
    Snapshot,
    TensorPiece,
    WeightFiles,
    WeightSource,
    WriteOrder,
    rng,
    write,
)
from zeroshard.checkpoint.export import CONFIG, GENERATION, config_of_diffusers, folder_of, texts_of
from zeroshard.checkpoint.facts import check_facts, check_ignored, given, kept
from zeroshard.comm.mesh import local_ranks
from zeroshard.engine.build import Assembly
from zeroshard.errors import CheckpointError, CheckpointWarning, DamagedError
from zeroshard.memory.ledger import Ledger
from zeroshard.optim.slices.updater import destination
from zeroshard.optim.states.folder_states import FolderStates
from zeroshard.optim.states.restoring import WAY_OUT, Saved, load_states
from zeroshard.optim.states.whole_states import elements_of, options_of, scalars_of, whole_pieces
from zeroshard.parts.axes import Axes
from zeroshard.parts.part import Part
from zeroshard.pipeline.buffers import Buffers
from zeroshard.pipeline.stage import Stage
from zeroshard.pipeline.whole import WholeModel
from zeroshard.quantized.stored import quantised_facts
from zeroshard.text import format_bytes
from zeroshard.units.adapters import base_names
from zeroshard.units.ignored import ignored_names, kept_by_rank

Wholes = TypeVar("Wholes", bound=WholeWeights)
SHARE = 0.9  # of free host memory that copies of a checkpoint may take


class State:
    """Saves and restores weights, optimizer states, buffers and random numbers of one rank.

    Attributes:
        buffers: of the model.
        base: frozen weights that are in files.
        tied: of each parameter with several names, the further ones, and the first.
        wholes: assembles parameters that are split over axes.
    """

    def __init__(
        self,
        model: nn.Module,
        assembly: Assembly,
        axes: Axes,
        ledger: Ledger,
        stage: Stage | WholeModel,
        tied: dict[str, str],
    ) -> None:
        self.tied = tied
        self._model, self._stage = model, stage
        self._parts, self._optimizer = assembly.parts, assembly.optimizer
        self._world = axes.world
        self.buffers = Buffers(model, axes.world.mesh, stage)
        self._snapshot, self._warned = Snapshot(ledger), False
        self.base = FrozenBase()
        self._axes = {name: axis.size for name, axis in axes.new.items()}
        self.wholes = WholeTensors(assembly.parts, axes.new, tied)

    def save(self, path: Path, facts: dict[str, Any], keep: int | None, wait: bool, base: bool) -> Saving:
        """Write all state of the next step; a collective call, which returns once everything is copied or written.

        Args:
            base: whether frozen weights that came from files are written too.
            keep: how many checkpoints in the folder of `path` stay.
            wait: return only once it is on the disk.

        Raises:
            CheckpointError: the path exists or cannot be made, `facts` is no JSON; or with `wait`, the write failed.
        """
        mesh, comm = self._world.mesh, self._world
        order = WriteOrder(path, "", [], {}, merged_facts, keep)
        order.token = self._begin(order, facts)
        order.facts = self._facts(facts)
        left = set() if base else self.base.left_out(comm)
        if left:
            order.facts["base"] = self.base.facts(left, self._weight_pieces(left))
        if wait:
            order.pieces = list(without(self._pieces(), left))
            write(order, mesh, Meeting(comm, path.name))
            return Saving(path, lambda: None)
        order.pieces = self._snapshot.take(without(self._pieces(), left), self._room())
        waits = sum(piece.values.nbytes for piece in order.pieces if not piece.lasting)
        if waits and not self._warned:
            self._warned = True
            warnings.warn(
                f"Host memory has no room to copy {format_bytes(waits)} of a checkpoint of "
                f"{format_bytes(sum(piece.values.nbytes for piece in order.pieces))}: training waits while they are "
                f"written, in this and later checkpoints. Free host memory, or say save(wait=True).",
                CheckpointWarning,
                stacklevel=4,
            )
        saving = Saving(path, lambda: write(order, mesh, Notes(mesh, order.token)))
        saving.start()
        if waits:
            order.written.wait()
        return saving

    def _room(self) -> float:
        """Bytes of host memory that copies of this rank may take."""
        mesh = self._world.mesh
        ranks = local_ranks() or mesh.ranks
        return min((SHARE * (r.nbytes // r.takers(ranks)) for r in mesh.platform.rooms()), default=math.inf)

    def load(self, path: Path) -> dict[str, Any]:
        """Take weights, optimizer states and random numbers from a checkpoint; returns its facts; a collective call.

        Raises:
            CheckpointError: it is of another model or optimizer. DamagedError: its content differs from its digests.
        """
        facts: dict[str, Any] = {}
        problem: CheckpointError | None = None
        try:
            facts = self._read(path)
        except CheckpointError as error:
            problem = error
        except Exception as error:  # a manifest written by hand can hold anything; its digest was right
            problem = CheckpointError(
                f"{path} is whole, but what it says does not fit this engine ({error!r}). Load it with the zeroshard, "
                f"model and optimizer that wrote it, or use another checkpoint."
            )
        self._refuse_on_all_ranks(problem)
        self._publish()
        if facts.get("base"):
            check_base(path, facts["base"], self._weight_pieces(facts["base"]["tensors"]), self._world)
        self._optimizer.account()
        return facts

    def unread_base(self, path: Path) -> str | None:
        """The files of the frozen base that a checkpoint left out, if this engine has read none yet."""
        if self.base.source is not None:
            return None
        try:
            base = Reader(path).facts.get("base")
        except CheckpointError:  # which `load` raises on all ranks
            return None
        return base["source"] if isinstance(base, dict) and isinstance(base.get("source"), str) else None

    def load_weights(self, path: Path | WeightSource, states: bool) -> None:
        """Load weights and buffers alone from safetensors files; a collective call, each rank reads its slices.

        Files of the base of a model with adapters leave the adapters as they are.

        Args:
            path: of the files; or a source whose names and shapes are those of the model.
            states: load the optimizer's states too, from a folder of `torch.distributed.checkpoint`.

        Raises:
            CheckpointError: they are of another model.
        """

        def opened() -> WeightSource:
            if not isinstance(path, Path):
                return path
            ignored = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()  # as transformers has it
            shapes, buffers, named = self._shapes(), dict(self._buffer_shapes()), base_names(self._model)
            source = WeightFiles(path, self.tied)
            if named is None or any(named(name) is None and source.holds(name) for name in shapes):
                source.fit(shapes, buffers, ignored)
                self._check_shapes(source, shapes)
                return source
            source = WeightFiles(path, _renamed({named(name): named(first) for name, first in self.tied.items()}))
            shapes = _renamed({named(name): shape for name, shape in shapes.items()})
            source.fit(shapes, _renamed({named(name): shape for name, shape in buffers.items()}), ignored)
            self._check_shapes(source, shapes)
            return BaseFiles(source, named)

        self._take_weights(opened, states)
        named = base_names(self._model) or str
        drawn = [name for name in self._shapes() if named(name) is None]
        report: LoadReport | None = getattr(path, "report", None)
        if report is not None:
            drawn += [*report.initialised, *report.partly]
        self.base.take(report.path if report else path if isinstance(path, Path) else None, self._parts.all, drawn)

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool) -> LoadedKeys:
        """Load weights and buffers alone from a state dict, rank 0's where other ranks pass None; a collective call.

        Raises:
            CheckpointError: it is of another model, or ranks give different ones.
        """
        whole, shapes = shared(state, self._world), self._shapes()
        given = GivenWeights(whole, self._model, self.tied)

        def opened() -> GivenWeights:
            given.fit(shapes, strict)
            return given

        check_same(whole, shapes.keys() | self.tied.keys(), self._world)
        self._take_weights(opened)
        given.set_extras()
        return given.keys

    def wholes_of(self, kind: type[Wholes], steps: Callable[[], int]) -> Wholes:
        """The whole tensors of the model, or their gradients, to be taken out one by one; a collective call."""
        return kind(self._model, self._parts, self.buffers, self.tied, self._world, steps)

    def _take_weights(self, opened: Callable[[], WeightSource], states: bool = False) -> None:
        """Load weights and buffers from opened files or tensors; an error of one rank is raised on all."""
        problem: CheckpointError | None = None
        try:
            source = opened()
            for part in self._parts.all:
                with part.updater.at_hand(writes=True):
                    self._load_weights(part, source)
            for name, buffer in self.buffers.present():
                found = f"buffer:{self.tied.get(name, name)}"
                if source.shape(found) is not None:
                    buffer.copy_(source.whole(found).view(buffer.shape))
            if states:
                self._take_states(source)
        except CheckpointError as error:
            problem = error
        self._refuse_on_all_ranks(problem)
        self._publish()

    def _take_states(self, source: WeightSource) -> None:
        """Load the optimizer's states of a folder of `torch.distributed.checkpoint`; the options stay this run's."""
        folder = source.distributed() if isinstance(source, WeightFiles) else None
        if folder is None or not isinstance(source, WeightFiles):
            raise CheckpointError(
                "load_weights(states=True) reads optimizer states of folders of torch.distributed.checkpoint alone. "
                "Go on from a checkpoint with engine.load(path), or take weights alone with states=False."
            )
        optimizer, names = self._optimizer.optimizer, {name: source.places(name) for name in self._shapes()}
        facts = {"class": type(optimizer).__name__, "groups": options_of(self._parts.all, optimizer)}
        reader: Any = FolderStates(source.path, folder, names, facts)
        saved = self._checked(reader)
        for part in self._parts.all:
            if part.gradients is not None:
                with part.updater.at_hand(writes=True):
                    load_states(part, reader, saved)
        self._optimizer.account()

    def _refuse_on_all_ranks(self, problem: CheckpointError | None) -> None:
        """Raise one rank's error on all ranks."""
        word = [type(problem) is DamagedError, str(problem)] if problem else None
        problems = [found for found in self._world.agree_on(word, "what was read") if found]
        if problems:
            damaged, text = problems[0]
            raise (DamagedError if damaged else CheckpointError)(text)

    def _publish(self) -> None:
        """Set the model's weights from the values that each rank owns, and publish them."""
        for part in self._parts.all:
            part.updater.restore()
            part.weights.publish()
            part.weights.published()

    def _begin(self, order: WriteOrder, facts: dict[str, Any]) -> str:
        """Agree with all ranks that the checkpoint can begin; returns the token of this attempt."""
        problem = found = None
        if self._world.mesh.rank == 0:
            order.token = f"{time.time_ns():x}"
            try:
                if order.path.exists():
                    problem = "it exists already, and checkpoints are never overwritten; choose another path"
                else:
                    order.disk.make_folder(order.temporary)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}; remove the cause, or choose another path"
        try:
            facts["extra"] = kept(facts["extra"])
            json.dumps(facts, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            found = str(error)
        if found:
            problem = f"what goes beside the weights must be plain values ({found})"
        answers = self._world.agree_on([problem, order.token], f"checkpoint {order.path.name}")
        problems = [problem for problem, _ in answers if problem]
        if problems:
            if self._world.mesh.rank == 0:
                order.disk.remove(order.temporary)
            raise CheckpointError(f"The checkpoint {order.path} was not written: {problems[0]}.")
        return str(answers[0][1])

    def _facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        """This rank's facts, those of its parts included."""
        optimizer = self._optimizer.optimizer
        groups = options_of(self._parts.all, optimizer)
        scalars = {name: kept for part in self._parts.all for name, kept in scalars_of(part).items()}
        layouts = {s.flat.label: s.gradients.layout for s in self._parts.all if s.gradients}
        texts, folder = texts_of(self._model), folder_of(self._model)
        return {
            **facts,
            "optimizer": {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars},
            "gradient_layouts": layouts,
            "last_update": {str(self._stage.number): facts["last_update"]},
            "cut": self._stage.facts,
            **({"axes": self._axes} if self._axes else {}),
            "buffers": self.buffers.facts(),
            "ignored": ignored_names(self._model, self.tied),
            **quantised_facts(self._model),
            **adapter_facts(self._model),
            "tied": self.tied,
            "config": texts[CONFIG] or config_of_diffusers(self._model),
            "generation": texts[GENERATION],
            "origin": None if folder is None else str(folder),
        }

    def _read(self, path: Path) -> dict[str, Any]:
        """Fill this rank's slices; no other rank is needed."""
        reader = Reader(path)
        check_facts(path, reader.facts)
        check_ignored(path, reader.facts.get("ignored", []), ignored_names(self._model, self.tied))
        left = (reader.facts.get("base") or {"tensors": {}})["tensors"]
        self._check_shapes(reader, self._shapes(), {name: tuple(row[0]) for name, row in left.items()})
        saved = self._checked(reader)
        mesh = self._world.mesh
        layout = (reader.facts["ranks"], reader.facts["cut"], reader.facts.get("axes", {}))
        same_layout = layout == (mesh.ranks, self._stage.facts, self._axes)
        if same_layout:
            missing = sorted({"torch", "python", "numpy"} - set(reader.names("rng")))
            if missing:
                raise CheckpointError(f"{path} lacks the random numbers 'rng:{missing[0]}'. {WAY_OUT}")
        for part in self._parts.all:
            with part.updater.at_hand(writes=True):
                self._load_weights(part, reader, left)
                if part.gradients is not None:
                    load_states(part, reader, saved)
        warn_of_dropped(path, self._parts.all, reader.kinds)
        for group, options in zip(self._optimizer.optimizer.param_groups, saved.groups, strict=True):
            group.update(options)
        self.buffers.load(reader, same_layout)
        if same_layout:
            for name in reader.names("rng"):
                rng.restore(name, reader.whole(f"rng:{name}", mesh.rank), mesh.device)
            for part in self._parts.all:
                if part.gradients is not None and part.flat.label in reader.facts["gradient_layouts"]:
                    part.gradients.layout = reader.facts["gradient_layouts"][part.flat.label]
        return {**reader.facts, "extra": given(reader.facts["extra"])}

    @property
    def numel(self) -> int:
        """Elements of all parameters of the model, those of other stages included."""
        return sum(map(math.prod, self._shapes().values()))

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part of a checkpoint."""
        return sum(piece.values.nbytes for piece in self._pieces())

    @property
    def fetched_nbytes(self) -> int:
        """Bytes that a checkpoint takes in host memory at least: the largest part that is fetched for it."""
        parts = (part for part in self._counted if not part.updater.as_saved)
        return max(
            (sum(p.values.nbytes for p in self._pieces_of(part, part.weights.rank)) for part in parts), default=0
        )

    @property
    def _counted(self) -> list[Part]:
        return [part for part in self._parts.all if part.place.counted]

    def _pieces(self) -> Iterator[TensorPiece]:
        """This rank's slice of every tensor, under each stage of ZeRO."""
        fetched = Fetched()
        for number, part in enumerate(self._counted):
            pieces = self._pieces_of(part, part.weights.rank)
            if not part.updater.as_saved:
                yield from fetched.pieces(number, pieces, partial(self._read_part, part))
                continue
            with part.updater.at_hand():
                yield from pieces
        yield from self.buffers.pieces()
        for name, state in rng.streams(self._world.mesh.device):
            yield TensorPiece.whole(f"rng:{name}", state)

    def _weight_pieces(self, names: Container[str]) -> Iterator[TensorPiece]:
        """This rank's slices of these weights, and of others beside them."""
        for part in self._counted:
            if any(entry.name in names for entry in part.flat.index.entries):
                with part.updater.at_hand():
                    yield from self._pieces_of(part, part.weights.rank)

    def _read_part(self, part: Part) -> list[torch.Tensor]:
        """The values of the pieces of a part; of states on the disk copies."""
        with part.updater.at_hand():
            return [piece.values for piece in self._pieces_of(part, part.weights.rank)]

    def _pieces_of(self, part: Part, rank: int) -> Iterator[TensorPiece]:
        index, updater = part.flat.index, part.updater
        for number, low, high in index.overlaps(*index.interval(rank)):
            name, shape = index.entries[number].name, part.whole_shape(number)
            weights = updater.exact(updater.values[low - updater.start : high - updater.start])
            for kind, values in chain([("weight", weights)], elements_of(part, low, high)):
                for (box, inside), counted in part.boxes(number, low, values):
                    if counted:
                        yield TensorPiece(f"{kind}:{name}", shape, box, inside)
        yield from whole_pieces(part, index.interval(rank))
        for number, entry in enumerate(index.entries):
            shape = part.whole_shape(number)
            if rank == 0 and math.prod(shape) == 0:
                yield TensorPiece(f"weight:{entry.name}", shape, Box.whole(shape), updater.values[:0])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters of the model, those of other stages included."""
        every = ((part, n, entry) for part in self._parts.all for n, entry in enumerate(part.flat.index.entries))
        return self._stage.shapes() | {entry.name: part.whole_shape(number) for part, number, entry in every}

    def _buffer_shapes(self) -> Iterator[tuple[str, tuple[int, ...] | None]]:
        """The shapes of all buffers of the model; None for those that no state dict holds."""
        for path, module in self._model.named_modules():
            kept = dict(kept_by_rank(module))
            for name, tensor in {**dict(module.named_buffers(recurse=False)), **kept}.items():
                if tensor is not None:
                    yield f"{path}.{name}" if path else name, tuple(tensor.shape) if name in kept else None

    def _check_shapes(
        self,
        reader: Reader | WeightFiles,
        mine: Mapping[str, tuple[int, ...]],
        left_out: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        theirs = {name: reader.shape(f"weight:{name}") for name in reader.names("weight")} | dict(left_out or {})
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                has, needs = theirs.get(name, "no such parameter"), mine.get(name, "no such parameter")
                raise CheckpointError(
                    f"{reader.path} is of another model: '{name}' is {has} there and {needs} here. Build the model as "
                    f"for the run that wrote it, or give the checkpoint of this model."
                )

    def _checked(self, reader: Reader) -> Saved:
        """The optimizer's state in a checkpoint, after a check that it fits this optimizer."""
        saved = Saved(reader, self._optimizer.optimizer, self._optimizer.layout.whole is None)
        for part in self._parts.all:
            for span in part.updater.spans:
                for number, _, _ in part.flat.index.overlaps(span.start, span.stop):
                    saved.check(part.flat.index.entries[number].name, span.group)
        return saved

    def _load_weights(self, part: Part, reader: Reader | WeightSource, left_out: Container[str] = ()) -> None:
        dtypes = {reader.dtype(f"weight:{entry.name}") for entry in part.flat.index.entries}
        values, start = destination(part.updater, dtypes.pop() if len(dtypes) == 1 else None), part.updater.start
        for number, low, high in part.flat.index.overlaps(start, start + values.numel()):
            name = part.flat.index.entries[number].name
            if name not in left_out:
                targets = [each for each, _ in part.boxes(number, low, values[low - start : high - start])]
                reader.fill(f"weight:{name}", targets)


def _renamed(found: Mapping[str | None, Any]) -> dict[str, Any]:
    """A table by names of the base, without adapters."""
    return {name: value for name, value in found.items() if name is not None}
