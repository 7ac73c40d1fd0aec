"""The model's buffers: the rank that saves each, and loading from a checkpoint.

[Note: whose buffer] Without a pipeline every rank has its own buffers: each writes its copy, and reads it again on the
same ranks; on other ranks rank 0's is read. In a pipeline a buffer belongs to the one stage that runs its module: the
replicas of that stage write their copies, and every rank with data rank q has the copy of replica q.

[Note: shapes of buffers] A buffer may grow in training, or be made in a forward. A checkpoint records the initial
shapes of such buffers. A model with equal initial shapes loads the saved buffers with their shapes; otherwise the
checkpoint is of another model.

Ignored parameters are kept as buffers are ([Note: ignored parameters]).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint import Reader, TensorPiece
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CheckpointError
from zeroshard.pipeline.stage import Stage
from zeroshard.pipeline.whole import WholeModel
from zeroshard.units.ignored import kept_by_rank

Shape = tuple[int, ...]


class Buffers:
    """The persistent buffers of one rank's model, by their names in its state dict."""

    def __init__(self, model: nn.Module, mesh: Mesh, stage: Stage | WholeModel) -> None:
        self._model, self._mesh, self._stage = model, mesh, stage
        self._made = {name: _shape(buffer) for name, _, _, buffer in self._all()}

    def present(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that have values on this rank."""
        for name, _, _, buffer in self._all():
            if buffer is not None and not buffer.is_meta:
                yield name, buffer

    def stages(self) -> dict[str, int]:
        """The stage of each buffer; 0 without a pipeline."""
        return {name: self._stage.stage_of_buffer(module, last) for name, module, last, _ in self._all()}

    def pieces(self) -> Iterator[TensorPiece]:
        """This rank's copies, for a checkpoint ([Note: whose buffer])."""
        stages = self.stages()
        for name, buffer in self.present():
            if stages[name] == self._stage.number:
                yield TensorPiece.whole(f"buffer:{name}", buffer.contiguous())

    def facts(self) -> dict[str, Any]:
        """The facts of a checkpoint on buffers whose shapes changed since the engine was made."""
        stages = self.stages()
        mine = [e for e in self._all() if stages[e[0]] == self._stage.number]
        other = {name: _shape(b) for name, _, _, b in mine if self._made.get(name) != _shape(b)}
        return {
            "made": {name: self._made.get(name) for name, shape in other.items() if shape is not None},
            "unset": [name for name, shape in other.items() if shape is None],
        }

    def load(self, reader: Reader, same_ranks: bool) -> None:
        """Load the buffers of a checkpoint.

        Args:
            same_ranks: whether as many ranks under the same cut wrote it, so that each rank has its own copy.

        Raises:
            CheckpointError: it is of a model with other buffers.
        """
        mine = {name: (module, last, buffer) for name, module, last, buffer in self._all()}
        kept, stages = facts_of(reader.facts), self.stages()
        modules = dict(self._model.named_modules())
        for name in dict.fromkeys([*mine, *reader.names("buffer")]):
            path, _, last = name.rpartition(".")
            module, last, buffer = mine.get(name) or (modules.get(path), last, None)
            there = reader.shape(f"buffer:{name}")
            made_there = _tuple(kept["made"].get(name, there)) if name not in kept["unset"] else self._made.get(name)
            if module is None or (made_there != self._made.get(name) and there != _shape(buffer)):
                raise CheckpointError(self._misfit(reader, name, there, buffer))
            if self._skips(module, buffer):
                continue
            if there is None:
                _set(module, last, None, registered=name in self._made)
                continue
            copy = self._stage.copy_of(stages.get(name, 0))
            values = reader.whole(f"buffer:{name}", copy if same_ranks else 0).view(there)
            if buffer is not None and tuple(buffer.shape) == there:
                buffer.copy_(values)
            else:
                dtype = values.dtype if buffer is None else buffer.dtype
                _set(module, last, values.to(self._mesh.device, dtype), registered=True)

    def _skips(self, module: nn.Module, buffer: torch.Tensor | None) -> bool:
        """Whether a module, which may have had such a buffer, runs on other stages alone."""
        return self._stage.is_elsewhere(module) if buffer is None else buffer.is_meta

    def _misfit(self, reader: Reader, name: str, there: Shape | None, buffer: torch.Tensor | None) -> str:
        has = "no such buffer" if there is None else str(there)
        needs = "no such buffer" if buffer is None else str(_shape(buffer))
        return (
            f"{reader.path} is of another model: the buffer '{name}' is {has} there and {needs} here. Build the model "
            f"that was trained there, or give it that buffer in that shape before the engine is made."
        )

    def _all(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor | None]]:
        """(name, module, name in it, values) of every persistent buffer, those that are None included."""
        for path, module in self._model.named_modules():
            for name, buffer in kept_by_rank(module):
                yield f"{path}.{name}" if path else name, module, name, None if buffer is None else buffer.detach()


def facts_of(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts from `Buffers.facts`; empty for checkpoints without them."""
    found: dict[str, Any] = facts.get("buffers") or {"made": {}, "unset": []}
    return found


def merged_facts(everyone: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The facts of all ranks on their buffers."""
    said = list(map(facts_of, everyone))
    return {
        "made": {name: shape for said in said for name, shape in said["made"].items()},
        "unset": sorted({name for said in said for name in said["unset"]}),
    }


def whole_state_dict(local: dict[str, Any], stage: Stage, buffers: Buffers) -> dict[str, Any]:
    """The complete state dict of a model that is cut into stages, on every rank; a collective call.

    Args:
        local: with the values of this rank's stage.
    """
    stages = buffers.stages()
    here = {name for layer in stage.layers for name in layer.parameters}
    elsewhere = {name for layer in stage.chain.layers for name in layer.parameters} - here
    present = {
        key: [list(value.shape), str(value.dtype), stages.get(key)]
        for key, value in local.items()
        if isinstance(value, torch.Tensor) and _present(value) and key not in elsewhere
    }
    everyone = stage.world.agree_on(present, "where the weights are")
    whole, layout = dict(local), stage.pipeline.layout
    for key in dict.fromkeys(key for theirs in everyone for key in theirs):
        holders = [rank for rank, theirs in enumerate(everyone) if key in theirs]
        owner = next((number for _, _, number in (everyone[rank][key] for rank in holders) if number is not None), None)
        copies = [rank for rank in holders if owner is not None and rank in layout.members(owner)]
        mine = stage.copy_of(owner) if owner is not None else -1
        for rank in copies or holders[:1]:  # parameters are the same on all, buffers are each replica's own
            shape, dtype, _ = everyone[rank][key]
            value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=stage.mesh.device)
            if stage.rank == rank:
                value.copy_(local[key])
            stage.world.broadcast(value, f"weights {key}", rank)
            if rank == mine or mine not in copies:
                whole[key] = value.cpu()
    return whole


def _present(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are on this rank: neither on meta nor one expanded zero."""
    return not tensor.is_meta and (tensor.numel() <= 1 or any(tensor.stride()))


def _set(module: nn.Module, name: str, value: torch.Tensor | None, registered: bool) -> None:
    """Set a buffer to `value`; with None and not `registered` it is removed."""
    if name in module._buffers and (registered or value is not None):
        module._buffers[name] = value
    elif value is not None:
        module.register_buffer(name, value)
    elif not registered:
        module._buffers.pop(name, None)


def _shape(buffer: torch.Tensor | None) -> Shape | None:
    return None if buffer is None else tuple(buffer.shape)


def _tuple(shape: Any) -> Shape | None:
    return None if shape is None else tuple(shape)
