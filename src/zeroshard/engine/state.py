"""A model's shards as the logical tensors of a checkpoint, and back."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint import Meeting, Notes, Order, Piece, Reader, Saving, Snapshot, WeightFiles, write
from zeroshard.engine import rng
from zeroshard.engine.assembly import Assembly, Shard
from zeroshard.engine.buffers import Buffers, merged_facts
from zeroshard.engine.facts import check_facts, plain, unfit
from zeroshard.engine.groups import Groups
from zeroshard.engine.restoring import WAY_OUT, Saved
from zeroshard.engine.stage import Stage, Whole
from zeroshard.errors import CheckpointError, DamagedError
from zeroshard.ledger import Ledger
from zeroshard.offload.moments import Blockwise
from zeroshard.offload.slices import MOMENTS, expanded
from zeroshard.optim import Span
from zeroshard.zero import Gatherer


class State:
    """Saves and restores weights, optimizer states, buffers and random numbers of one rank."""

    def __init__(
        self,
        model: nn.Module,
        assembly: Assembly,
        groups: Groups,
        ledger: Ledger,
        stage: Stage | Whole,
        tied: dict[str, str],
    ) -> None:
        self._tied = tied
        self._model, self._assembly, self._comm, self._stage = model, assembly, groups.slices, stage
        self._world = groups.world
        self.buffers = Buffers(model, groups.world.mesh, stage)
        self._snapshot = Snapshot(ledger)
        self._writes_slices = groups.replicas is None or groups.replicas.mesh.rank == 0

    def save(self, path: Path, facts: dict[str, Any], keep: int | None, wait: bool) -> Saving:
        """Write everything that the next step depends on; a collective call, which returns when all is copied.

        Args:
            keep: how many checkpoints beside `path` stay.
            wait: return when it is on the disk instead.

        Raises:
            CheckpointError: the path exists or cannot be made, `facts` is no JSON; or with `wait`, what went wrong.
        """
        mesh, comm = self._world.mesh, self._world
        order = Order(path, "", [], {}, _merged, keep)
        order.token = self._begin(order, facts)
        order.facts = self._facts(facts)
        if wait:
            order.pieces = list(self._pieces())
            write(order, mesh, Meeting(comm, path.name))
            return Saving(path, lambda: None)
        order.pieces = self._snapshot.take(self._pieces())
        saving = Saving(path, lambda: write(order, mesh, Notes(mesh, order.token)))
        saving.start()
        return saving

    def load(self, path: Path) -> dict[str, Any]:
        """Take weights, optimizer states and random numbers from a checkpoint; returns its facts; a collective call.

        Raises:
            CheckpointError: it is of another model or optimizer. DamagedError: it is not what was written.
        """
        facts: dict[str, Any] = {}
        problem: CheckpointError | None = None
        try:
            facts = self._read(path)
        except CheckpointError as error:
            problem = error
        except Exception as error:  # a manifest that somebody wrote by hand can hold anything; its digest was right
            problem = CheckpointError(
                f"{path} is whole, but what it says does not fit this engine ({error!r}). Load it with the zeroshard, "
                f"model and optimizer that wrote it, or use another checkpoint."
            )
        self._refuse_together(problem)
        self._spread()
        self._assembly.optimizer.account()
        return facts

    def load_weights(self, path: Path) -> None:
        """Take weights and buffers alone from safetensors files; a collective call, each rank reads its slices.

        Raises:
            CheckpointError: they are of another model.
        """
        problem: CheckpointError | None = None
        try:
            source = WeightFiles(path, self._tied)
            ignored = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()  # as transformers has it
            source.fit(self._shapes(), dict(self._buffer_shapes()), ignored)
            self._check_shapes(source)
            for shard in self._assembly.all_shards:
                with at_hand(shard, writes=True):
                    self._load_weights(shard, source)
            for name, buffer in self.buffers.here():
                if source.shape(f"buffer:{name}") is not None:
                    buffer.copy_(source.whole(f"buffer:{name}").view(buffer.shape))
        except CheckpointError as error:
            problem = error
        self._refuse_together(problem)
        self._spread()

    def _refuse_together(self, problem: CheckpointError | None) -> None:
        """Raise on all ranks what one of them met."""
        word = [type(problem) is DamagedError, str(problem)] if problem else None
        problems = [found for found in self._world.agree_on(word, "what was read") if found]
        if problems:
            damaged, text = problems[0]
            raise (DamagedError if damaged else CheckpointError)(text)

    def _spread(self) -> None:
        """Let the weights that are computed with be those that this rank owns."""
        for shard in self._assembly.all_shards:
            if shard.master:
                with at_hand(shard):
                    shard.target.copy_(shard.owned)
            shard.parameters.start_spread()
            shard.parameters.finish_spread()

    def _begin(self, order: Order, facts: dict[str, Any]) -> str:
        """Let all ranks agree that a checkpoint can be begun; the token of this try."""
        problem = found = None
        if self._world.mesh.rank == 0:
            order.token = f"{time.time_ns():x}"
            try:
                if order.path.exists():
                    problem = "it exists already, and checkpoints are never overwritten; choose another path"
                else:
                    order.disk.make_folder(order.temporary)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        try:
            found = unfit(facts["extra"])
            json.dumps(facts, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            found = found or str(error)
        if found:
            problem = f"what goes beside the weights must be plain and finite JSON values ({found})"
        words = self._world.agree_on([problem, order.token], f"checkpoint {order.path.name}")
        problems = [problem for problem, _ in words if problem]
        if problems:
            if self._world.mesh.rank == 0:
                order.disk.remove(order.temporary)
            raise CheckpointError(f"The checkpoint {order.path} was not written: {problems[0]}.")
        return str(words[0][1])

    def _facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        """This rank's facts, those of its shards included."""
        optimizer = self._assembly.optimizer.optimizer
        groups = [{k: plain(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        scalars = {name: kept for shard in self._assembly.all_shards for name, kept in self._scalars(shard).items()}
        layouts = {s.flat.label: s.gradients.layout for s in self._assembly.all_shards if s.gradients}
        return {
            **facts,
            "optimizer": {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars},
            "gradient_layouts": layouts,
            "last_update": {str(self._stage.number): facts["last_update"]},
            "cut": self._stage.facts,
            "buffers": self.buffers.facts(),
            "tied": self._tied,
            "config": _config(self._model),
        }

    def _read(self, path: Path) -> dict[str, Any]:
        """Fill what this rank owns; no other rank is needed."""
        reader = Reader(path)
        check_facts(path, reader.facts)
        self._check_shapes(reader)
        saved = self._checked(reader)
        mesh = self._world.mesh
        same_layout = (reader.facts["ranks"], reader.facts["cut"]) == (mesh.ranks, self._stage.facts)
        if same_layout:
            missing = sorted({"torch", "python", "numpy"} - set(reader.names("rng")))
            if missing:
                raise CheckpointError(f"{path} lacks the random numbers 'rng:{missing[0]}'. {WAY_OUT}")
        for shard in self._assembly.all_shards:
            with at_hand(shard, writes=True):
                self._load_weights(shard, reader)
                if shard.gradients is not None:
                    self._load_optimizer(shard, reader, saved)
        for group, options in zip(self._assembly.optimizer.optimizer.param_groups, saved.groups, strict=True):
            group.update(options)
        self.buffers.load(reader, same_layout)
        if same_layout:
            for name in reader.names("rng"):
                rng.restore(name, reader.whole(f"rng:{name}", mesh.rank), mesh.device)
            for shard in self._assembly.all_shards:
                if shard.gradients is not None and shard.flat.label in reader.facts["gradient_layouts"]:
                    shard.gradients.restore_layout(*reader.facts["gradient_layouts"][shard.flat.label])
        return reader.facts

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part of a checkpoint."""
        return sum(piece.values.nbytes for piece in self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        """This rank's slice of every tensor, whatever the stage."""
        rank = self._comm.mesh.rank
        for shard in self._assembly.all_shards if self._writes_slices else []:
            with at_hand(shard):
                yield from self._pieces_of(shard, rank)
        yield from self.buffers.pieces()
        for name, state in rng.streams(self._comm.mesh.device):
            yield Piece.whole(f"rng:{name}", state)

    def _pieces_of(self, shard: Shard, rank: int) -> Iterator[Piece]:
        index, start = shard.flat.index, shard.start
        for number, low, high in index.overlaps(*index.interval(rank)):
            entry = index.entries[number]
            shape, first = tuple(entry.shape), low - entry.offset
            weights = shard.owned[low - start : high - start]
            if shard.home is not None and shard.home.on_disk:
                weights = weights.clone()  # for it is here no longer than this takes
            yield from Piece.cut(f"weight:{entry.name}", shape, first, weights)
            for key, value in self._elements(shard, low, high):
                yield from Piece.cut(f"{key}:{entry.name}", shape, first, value)
        if rank == 0:
            for entry in (entry for entry in index.entries if entry.numel == 0):
                yield from Piece.cut(f"weight:{entry.name}", tuple(entry.shape), 0, shard.owned[:0])

    def _elements(self, shard: Shard, low: int, high: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Optimizer states of the elements [low, high) of one parameter, which may lie in several spans."""
        parts: dict[str, list[torch.Tensor]] = {}
        for span in self._spans(shard):
            a, b = max(low, span.start), min(high, span.stop)
            if a < b:
                for key, value in self._state(span).items():
                    if _elementwise(value, span):
                        parts.setdefault(key, []).append(_precise(value, shard)[a - span.start : b - span.start])
        for key, values in parts.items():
            yield key, values[0] if len(values) == 1 else torch.cat(values)

    def _scalars(self, shard: Shard) -> dict[str, dict[str, Any]]:
        """States that are no element's (step counts), by parameter."""
        scalars: dict[str, dict[str, Any]] = {}
        for span in self._spans(shard):
            kept = {k: plain(v) for k, v in self._state(span).items() if not _elementwise(v, span)}
            for number, _, _ in shard.flat.index.overlaps(span.start, span.stop):
                if self._state(span):
                    scalars[shard.flat.index.entries[number].name] = kept
        return scalars

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters of the model, those of other stages included."""
        mine = {e.name: tuple(e.shape) for s in self._assembly.all_shards for e in s.flat.index.entries}
        return mine | self._stage.shapes()

    def _buffer_shapes(self) -> Iterator[tuple[str, tuple[int, ...] | None]]:
        """The shapes of all buffers of the model; None for those that no state dict holds."""
        for path, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                kept = name not in module._non_persistent_buffers_set
                yield f"{path}.{name}" if path else name, tuple(buffer.shape) if kept else None

    def _check_shapes(self, reader: "Reader | WeightFiles") -> None:
        mine = self._shapes()
        theirs = {name: reader.shape(f"weight:{name}") for name in reader.names("weight")}
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                has, needs = theirs.get(name, "no such parameter"), mine.get(name, "no such parameter")
                raise CheckpointError(f"{reader.path} is of another model: '{name}' is {has} there and {needs} here.")

    def _checked(self, reader: Reader) -> Saved:
        """What a checkpoint says of the optimizer, which has been found to fit what is trained here."""
        saved = Saved(reader, self._assembly.optimizer.optimizer)
        for shard in self._assembly.all_shards:
            for span in self._spans(shard):
                for number, _, _ in shard.flat.index.overlaps(span.start, span.stop):
                    saved.check(shard.flat.index.entries[number].name, span.group)
        return saved

    def _load_weights(self, shard: Shard, reader: "Reader | WeightFiles") -> None:
        trainable, parameters = shard.flat.trainable, shard.parameters
        whole = not trainable and not parameters.sliced
        region, start = (parameters.full, 0) if whole else (shard.owned, shard.start)
        for number, low, high in shard.flat.index.overlaps(start, start + region.numel()):
            entry = shard.flat.index.entries[number]
            reader.read(f"weight:{entry.name}", region[low - start : high - start], low - entry.offset)

    def _load_optimizer(self, shard: Shard, reader: Reader, saved: Saved) -> None:
        entries = shard.flat.index.entries
        kept = [(saved.scalars.get(entry.name), saved.kinds(entry.name)) for entry in entries]
        cuts = [after.offset for a, b, after in zip(kept, kept[1:], entries[1:], strict=False) if a != b]
        self._assembly.optimizer.split(shard.spans, cuts)
        if shard.home is not None:
            spans = self._spans(shard)
            shard.home.lay_out([(span.start - shard.start, span.stop - shard.start) for span in spans])
        state = self._assembly.optimizer.optimizer.state
        for span in self._spans(shard):
            entry = entries[shard.flat.index.number_at(span.start)]
            loaded = saved.state(entry.name)
            state.pop(span.tensor, None)
            if loaded is None:
                if shard.home is not None:
                    shard.home.forget_moments(span.start - shard.start, span.stop - shard.start)
                continue
            for key in saved.kinds(entry.name):
                loaded[key] = values = torch.zeros_like(span.tensor)
                for number, low, high in shard.flat.index.overlaps(span.start, span.stop):
                    name, first = entries[number].name, low - entries[number].offset
                    reader.read(f"{key}:{name}", values[low - span.start : high - span.start], first)
            state[span.tensor] = loaded
            if shard.home is not None:
                start, stop = span.start - shard.start, span.stop - shard.start
                shard.home.keep_moments(start, stop, *(loaded[name] for name in MOMENTS))
                loaded.update(shard.home.moments(start, stop))

    def _spans(self, shard: Shard) -> list[Span]:
        return self._assembly.optimizer.spans(shard.spans) if shard.gradients is not None else []

    def _state(self, span: Span) -> dict[str, Any]:
        state: dict[str, Any] = self._assembly.optimizer.optimizer.state.get(span.tensor, {})
        return state


@contextmanager
def at_hand(shard: Shard, writes: bool = False) -> Iterator[None]:
    """Have what a shard owns in memory inside, wherever it is kept; take what was written there if `writes`."""
    if shard.home is None:
        yield
        return
    with shard.home.fetched(writes):
        yield


def state_dict_by_unit(model: nn.Module, assembly: Assembly, gatherer: Gatherer) -> dict[str, Any]:
    """The complete state dict of a model that the device cannot hold, on every rank; a collective call."""
    found: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    keys: dict[int, list[str]] = {}
    for key, value in found.items():
        if isinstance(value, torch.Tensor):
            keys.setdefault(id(value), []).append(key)
            found[key] = value if isinstance(value, nn.Parameter) else value.detach().cpu().clone()
    for number, shards in enumerate(assembly.shards):
        with gatherer.visit(number):
            for parameter in (parameter for shard in shards for parameter in shard.flat.parameters):
                for key in keys.get(id(parameter), ()):
                    found[key] = parameter.detach().cpu().clone()
    return found


def _merged(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of a checkpoint: rank 0's, with what each rank knows of its own shards."""
    facts = dict(everyone[0])
    scalars = {name: kept for rank in everyone for name, kept in rank["optimizer"]["scalars"].items()}
    facts["optimizer"] = {**facts["optimizer"], "scalars": scalars}
    facts["gradient_layouts"] = {label: v for rank in everyone for label, v in rank["gradient_layouts"].items()}
    facts["buffers"] = merged_facts(everyone)
    facts["last_update"] = {stage: v for rank in everyone for stage, v in rank["last_update"].items()}
    never = [rank["never_written"] for rank in everyone]
    if facts["cut"][0] > 1:
        facts["never_written"] = None if None in never else sorted({name for names in never for name in names})
    return facts


def tied_names(model: nn.Module) -> dict[str, str]:
    """Of parameters with several names, each further name and the first; before the model is cut into stages."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _config(model: nn.Module) -> dict[str, Any] | None:
    """The configuration of a transformers model, as `from_pretrained` reads it."""
    describe = getattr(getattr(model, "config", None), "to_json_string", None)
    if describe is None:
        return None
    config: dict[str, Any] = json.loads(describe())
    return {**config, "architectures": [type(model).__name__]}


def _elementwise(value: Any, span: Span) -> bool:
    if isinstance(value, Blockwise):
        return True
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == span.tensor.shape


def _precise(value: Any, shard: Shard) -> torch.Tensor:
    """A state as a checkpoint holds it: moments that are kept in fewer bits become fp32."""
    if shard.home is None:
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    return expanded(value).clone() if shard.home.on_disk else expanded(value)
