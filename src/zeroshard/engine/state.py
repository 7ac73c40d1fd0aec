"""A model's shards as the logical tensors of a checkpoint, and back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint import Piece, Reader, write
from zeroshard.engine.assembly import Assembly, Shard
from zeroshard.engine.groups import Groups
from zeroshard.engine.stage import Stage
from zeroshard.errors import CheckpointError
from zeroshard.optim import Span

RNG, DEVICE_RNG = "rng:torch", "rng:cuda"


class State:
    """Saves and restores weights, optimizer states and random numbers of one rank."""

    def __init__(self, model: nn.Module, assembly: Assembly, groups: Groups, stage: Stage | None = None) -> None:
        self._model, self._assembly, self._comm, self._stage = model, assembly, groups.slices, stage
        self._world = groups.world
        self._writes_slices = groups.replicas is None or groups.replicas.mesh.rank == 0

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Write everything that the next step depends on; a collective call.

        Raises:
            CheckpointError: the path exists, `facts` is no JSON, or a rank could not write.
        """
        try:
            json.dumps(facts)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"What goes beside the weights must be plain JSON values: {error}.") from error
        scalars = [self._scalars(shard) for shard in self._assembly.all_shards]
        everyone = self._world.agree_on(scalars, "optimizer scalars")
        merged: dict[str, Any] = {}
        for rank in everyone:
            for names in rank:
                merged.update(names)
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self._assembly.optimizer.optimizer.param_groups
        ]
        kind = type(self._assembly.optimizer.optimizer).__name__
        optimizer = {"class": kind, "groups": [{k: _plain(v) for k, v in g.items()} for g in groups], "scalars": merged}
        layouts = {s.flat.label: s.gradients.layout for s in self._assembly.all_shards if s.gradients}
        layouts = {label: v for rank in self._world.agree_on(layouts, "gradient layouts") for label, v in rank.items()}
        write(
            path,
            self._pieces(),
            {**facts, "optimizer": optimizer, "gradient_layouts": layouts, "cut": self._cut},
            self._world,
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Take weights, optimizer states and random numbers from a checkpoint; returns its facts.

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer.
        """
        reader = Reader(path)
        optimizer = reader.facts["optimizer"]
        self._check(reader, optimizer)
        for shard in self._assembly.all_shards:
            self._load_weights(shard, reader)
            if shard.gradients is not None:
                self._load_optimizer(shard, reader, optimizer["scalars"])
        for group, saved in zip(self._assembly.optimizer.optimizer.param_groups, optimizer["groups"], strict=True):
            group.update({k: _setting(v) for k, v in saved.items() if k in group})
        rank = self._world.mesh.rank
        same_layout = (reader.facts["ranks"], reader.facts.get("cut", [1, 1, None])) == (
            self._world.mesh.ranks,
            self._cut,
        )
        for name, buffer in self._buffers():
            part = self._part_of(name) if same_layout else 0
            buffer.copy_(reader.whole(f"buffer:{name}", part).view(buffer.shape))
        if same_layout:
            torch.set_rng_state(reader.whole(RNG, rank))
            if self._comm.mesh.device.type == "cuda" and reader.shape(DEVICE_RNG) is not None:
                torch.cuda.set_rng_state(reader.whole(DEVICE_RNG, rank), self._comm.mesh.device)
            for shard in self._assembly.all_shards:
                if shard.gradients is not None and shard.flat.label in reader.facts["gradient_layouts"]:
                    shard.gradients.restore_layout(*reader.facts["gradient_layouts"][shard.flat.label])
        self._assembly.optimizer.account()
        facts: dict[str, Any] = reader.facts
        return facts

    def _pieces(self) -> Iterator[Piece]:
        """This rank's slice of every tensor, whatever the stage."""
        rank = self._comm.mesh.rank
        for shard in self._assembly.all_shards if self._writes_slices else []:
            index, start = shard.flat.index, shard.start
            for number, low, high in index.overlaps(*index.interval(rank)):
                entry = index.entries[number]
                shape, first = tuple(entry.shape), low - entry.offset
                yield Piece(f"weight:{entry.name}", shape, first, shard.owned[low - start : high - start])
                for key, value in self._elements(shard, low, high):
                    yield Piece(f"{key}:{entry.name}", shape, first, value)
            if rank == 0:
                for entry in (entry for entry in index.entries if entry.numel == 0):
                    yield Piece(f"weight:{entry.name}", tuple(entry.shape), 0, shard.owned[:0])
        for name, buffer in self._buffers():
            yield Piece(f"buffer:{name}", tuple(buffer.shape), 0, buffer)
        yield Piece(RNG, (), 0, torch.get_rng_state())
        if self._comm.mesh.device.type == "cuda":
            yield Piece(DEVICE_RNG, (), 0, torch.cuda.get_rng_state(self._comm.mesh.device))

    def _elements(self, shard: Shard, low: int, high: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Optimizer states of the elements [low, high) of one parameter, which may lie in several spans."""
        parts: dict[str, list[torch.Tensor]] = {}
        for span in self._spans(shard):
            a, b = max(low, span.start), min(high, span.stop)
            if a < b:
                for key, value in self._state(span).items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == span.tensor.shape:
                        parts.setdefault(key, []).append(value[a - span.start : b - span.start])
        for key, values in parts.items():
            yield key, values[0] if len(values) == 1 else torch.cat(values)

    def _scalars(self, shard: Shard) -> dict[str, dict[str, Any]]:
        """States that are no element's (step counts), by parameter."""
        scalars: dict[str, dict[str, Any]] = {}
        for span in self._spans(shard):
            kept = {k: _plain(v) for k, v in self._state(span).items() if not _elementwise(v, span)}
            for number, _, _ in shard.flat.index.overlaps(span.start, span.stop):
                if self._state(span):
                    scalars[shard.flat.index.entries[number].name] = kept
        return scalars

    def _check(self, reader: Reader, optimizer: dict[str, Any]) -> None:
        mine = {e.name: tuple(e.shape) for s in self._assembly.all_shards for e in s.flat.index.entries}
        if self._stage is not None:
            layers = self._stage.chain.layers
            mine |= {name: tuple(p.shape) for layer in layers for name, p in layer.parameters.items()}
        theirs = {name: reader.shape(f"weight:{name}") for name in reader.names("weight")}
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                has, needs = theirs.get(name, "no such parameter"), mine.get(name, "no such parameter")
                raise CheckpointError(f"{reader.path} is of another model: '{name}' is {has} there and {needs} here.")
        kind = type(self._assembly.optimizer.optimizer).__name__
        groups = len(self._assembly.optimizer.optimizer.param_groups)
        if (optimizer["class"], len(optimizer["groups"])) != (kind, groups):
            raise CheckpointError(
                f"{reader.path} was written with {optimizer['class']} in {len(optimizer['groups'])} parameter groups, "
                f"this run has {kind} "
                f"in {groups}. Use the same optimizer to go on."
            )

    def _load_weights(self, shard: Shard, reader: Reader) -> None:
        trainable, parameters = shard.flat.trainable, shard.parameters
        whole = not trainable and not parameters.sliced
        region, start = (parameters.full, 0) if whole else (shard.owned, shard.start)
        for number, low, high in shard.flat.index.overlaps(start, start + region.numel()):
            entry = shard.flat.index.entries[number]
            reader.read(f"weight:{entry.name}", region[low - start : high - start], low - entry.offset)
        if shard.master:
            shard.target.copy_(shard.owned)
        parameters.start_spread()
        parameters.finish_spread()

    def _load_optimizer(self, shard: Shard, reader: Reader, scalars: dict[str, Any]) -> None:
        entries = shard.flat.index.entries
        kept = [scalars.get(entry.name) for entry in entries]
        cuts = [after.offset for a, b, after in zip(kept, kept[1:], entries[1:], strict=False) if a != b]
        self._assembly.optimizer.split(shard.spans, cuts)
        state = self._assembly.optimizer.optimizer.state
        for span in self._spans(shard):
            entry = entries[shard.flat.index.number_at(span.start)]
            known = scalars.get(entry.name)
            state.pop(span.tensor, None)
            if known is None:
                continue
            loaded: dict[str, Any] = {k: _setting(v) for k, v in known.items()}
            for key in _state_kinds(reader, entry.name):
                loaded[key] = values = torch.zeros_like(span.tensor)
                for number, low, high in shard.flat.index.overlaps(span.start, span.stop):
                    name, first = entries[number].name, low - entries[number].offset
                    reader.read(f"{key}:{name}", values[low - span.start : high - span.start], first)
            state[span.tensor] = loaded

    def _spans(self, shard: Shard) -> list[Span]:
        return self._assembly.optimizer.spans(shard.spans) if shard.gradients is not None else []

    def _state(self, span: Span) -> dict[str, Any]:
        state: dict[str, Any] = self._assembly.optimizer.optimizer.state.get(span.tensor, {})
        return state

    @property
    def _cut(self) -> list[Any]:
        layout = self._stage.pipeline.layout if self._stage else None
        return [layout.stages, layout.chunks, list(layout.replicas)] if layout else [1, 1, None]

    def _part_of(self, name: str) -> int:
        """Which of the saved copies of a buffer was this rank's: those of a layer are its stage's alone."""
        stage = self._stage
        if stage is None:
            return self._world.mesh.rank
        module = self._model.get_submodule(name.rpartition(".")[0])
        inside = any(module in top.modules() for layer in stage.layers for top in layer.modules)
        return (stage.mesh if inside else stage.world.mesh).rank

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set and not buffer.is_meta:
                    yield f"{path}.{name}" if path else name, buffer


def whole_state_dict(model: nn.Module, stage: Stage) -> dict[str, Any]:
    """The complete state dict of a model that is cut into stages, on every rank; a collective call."""
    local = model.state_dict()
    here = {k: [list(v.shape), str(v.dtype)] for k, v in local.items() if isinstance(v, torch.Tensor) and _present(v)}
    everyone = stage.world.agree_on(here, "where the weights are")
    whole = dict(local)
    for key in local:
        source = next((rank for rank, theirs in enumerate(everyone) if key in theirs), None)
        if source is not None:
            shape, dtype = everyone[source][key]
            value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=stage.mesh.device)
            if stage.rank == source:
                value.copy_(local[key])
            stage.world.broadcast(value, f"weights {key}", source)
            whole[key] = value.cpu()
    return whole


def _present(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are on this rank: not on meta, nor one zero seen everywhere."""
    return not tensor.is_meta and (tensor.numel() <= 1 or any(tensor.stride()))


def _state_kinds(reader: Reader, name: str) -> list[str]:
    """The optimizer states that a checkpoint holds for a parameter."""
    kinds = (full.partition(":") for full in reader.tensors)
    return [kind for kind, _, of in kinds if of == name and kind not in ("weight", "buffer", "rng")]


def _elementwise(value: Any, span: Span) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == span.tensor.shape


def _plain(value: Any) -> Any:
    """A scalar tensor as ["tensor", dtype, value]; plain values as they are."""
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), value.item()]
    return value


def _setting(value: Any) -> Any:
    """What `_plain` made of a setting or a scalar state, as it was; JSON has lists where there were tuples."""
    if isinstance(value, list) and value[:1] == ["tensor"]:
        return torch.tensor(value[2], dtype=getattr(torch, value[1]))
    return tuple(value) if isinstance(value, list) else value
