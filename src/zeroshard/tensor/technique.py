"""The technique of tensor parallelism: it cuts the layers of a model and puts split forwards in their places.

Ranks are numbered with those of one tensor group innermost, as in PTD-P (2104.04473, section 3.4).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.errors import PlanError
from zeroshard.parts.place import Axis, Partial, Piece, Split
from zeroshard.parts.technique import NewAxis
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.tensor.check_gradients import GradientCheck
from zeroshard.tensor.collectives import TensorRanks
from zeroshard.tensor.find_layers import find
from zeroshard.tensor.found import Found, FoundLayer, Segment, Style
from zeroshard.tensor.layers import ColumnForward, Entrance, RowForward
from zeroshard.tensor.overlap import Parameters
from zeroshard.tensor.policy import TensorParallel
from zeroshard.tensor.sequence import SequenceBlocks, open_attention
from zeroshard.tensor.vocabulary import split_embedding, split_output
from zeroshard.tensor.zones import Zones
from zeroshard.units.hooks import Hook

AXIS = "tensor"


class TensorTechnique:
    """Splits the layers of one model; a `parts.technique.Technique`.

    Args:
        transport: of the plan.

    Attributes:
        zones: of the model's forwards.
        found: what was found in the model, once it is cut.
    """

    def __init__(self, policy: TensorParallel, transport: str = "network") -> None:
        self._policy, self._transport = policy, transport
        self.zones = Zones()
        self.found: Found | None = None

    def axes(self, ranks: int) -> Mapping[str, NewAxis]:
        """Neighbouring ranks.

        Raises:
            PlanError: they do not divide.
        """
        size = self._policy.ranks
        if ranks % size:
            raise PlanError(
                f"{ranks} ranks of a stage do not divide into groups of tensor_parallel={size}; start a multiple of "
                f"{size} ranks for each stage, or set tensor_parallel to a divisor of {ranks}."
            )
        return {AXIS: NewAxis([list(range(first, first + size)) for first in range(0, ranks, size)], data=False)}

    def replicated_over(self, layer: str) -> str | None:
        """Its own axis, unless sequence parallelism gives each rank own positions of what enters a layer."""
        return None if self._policy.sequence else AXIS

    def cut(self, model: nn.Module, axes: Mapping[str, Axis]) -> Mapping[nn.Parameter, Split | Partial]:
        """Put this rank's parts in the place of parameters, and split forwards in the place of forwards.

        Raises:
            PlanError, ModelError: a layer cannot be split as the plan says.
        """
        ranks = TensorRanks(axes[AXIS])
        self._share_memory(ranks.comm)
        self.found = found = find(model, ranks.size, self._policy)
        places = _Cutting(model, found, ranks, self._policy.sequence).places
        modules = dict(model.named_modules())
        forwards = _Forwards(model, found, ranks, self.zones)
        forwards.install()
        if self._policy.sequence:
            for stack in found.blocks:
                SequenceBlocks([(name, modules[name]) for name in stack], ranks, self.zones)
            for attention in found.attentions:
                if attention.name in forwards.entrances:
                    entrance = forwards.entrances[attention.name]
                    open_attention(modules[attention.name], attention.name, entrance, self.zones)
        model.register_forward_pre_hook(Hook(lambda *_: self.zones.reset()), prepend=True)
        named = {name: places[p] for name, p in model.named_parameters(remove_duplicate=False) if p in places}
        for name in (name for stack in found.blocks for name in stack):
            GradientCheck(modules[name], name, named, self.zones)
        return places


    def _share_memory(self, comm: Comm) -> None:
        """Where the plan lets them and the machine can, let the ranks see each other's activations."""
        if self._transport == "network":
            return
        reason: str | None = "the ranks do not compute on CPUs"
        if not is_accelerator(comm.mesh.device):
            reason = comm.share_operands()
        if reason is not None and self._transport == "shared":
            raise PlanError(f"transport='shared' cannot be: {reason}. Or leave transport='auto'.")


class _Cutting:
    """Cuts the parameters of a model.

    Attributes:
        places: of each new or partial parameter.
    """

    def __init__(self, model: nn.Module, found: Found, ranks: TensorRanks, sequence: bool) -> None:
        self._ranks, self._new = ranks, dict[nn.Parameter, nn.Parameter]()
        self.places: dict[nn.Parameter, Split | Partial] = {}
        modules = dict(model.named_modules())
        inside = [f"{name}." for stack in found.blocks for name in stack]
        for layer in found.layers:
            module = modules[layer.name]
            within = any(f"{layer.name}.".startswith(block) for block in inside)
            if layer.style is Style.WHOLE:
                if layer.partial or (sequence and within):
                    self.places |= {p: Partial(AXIS) for p in module.parameters(recurse=False)}
                continue
            for name, parameter in list(module.named_parameters(recurse=False)):
                dimension = dimension_of(layer, module, name)
                if dimension is not None:
                    module._parameters[name] = self._part(parameter, layer, dimension)
                elif sequence and within:
                    self.places[parameter] = Partial(AXIS)
            _set_sizes(module, layer, ranks)
        for attention in found.attentions:
            for name, value in attention.sizes.items():
                setattr(modules[attention.name], name, value)

    def _part(self, whole: nn.Parameter, layer: FoundLayer, dimension: int) -> nn.Parameter:
        if whole in self._new:
            return self._new[whole]
        pieces = tuple(pieces_of(layer.segments, self._ranks.size, self._ranks.rank))
        values = torch.cat([whole.detach().narrow(dimension, p.start, p.stop - p.start) for p in pieces], dimension)
        part = self._new[whole] = nn.Parameter(values.contiguous(), requires_grad=whole.requires_grad)
        self.places[part] = Split(AXIS, tuple(whole.shape), dimension, pieces)
        return part


def pieces_of(segments: tuple[Segment, ...], ranks: int, rank: int) -> Iterator[Piece]:
    """What a rank holds of the features of a layer: of each segment the part that is its own."""
    first = 0
    for segment in segments:
        part = rank * segment.parts // ranks
        chunk = -(-segment.size // segment.parts)
        start, stop = min(part * chunk, segment.size), min((part + 1) * chunk, segment.size)
        yield Piece(first + start, first + stop, counted=-(-part * ranks // segment.parts) == rank)
        first += segment.size


def dimension_of(layer: FoundLayer, module: nn.Module, name: str) -> int | None:
    """The dimension along which a parameter of a split layer is cut; None for the bias of a row-parallel layer."""
    if name == "bias":
        return None if layer.style is Style.ROW else 0
    return int((layer.style is Style.ROW) != is_transposed(module)) if layer.style in (Style.COLUMN, Style.ROW) else 0


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is [I, O], as that of transformers' Conv1D."""
    return type(module).__name__ == "Conv1D"


def _set_sizes(module: Any, layer: FoundLayer, ranks: TensorRanks) -> None:
    """Let a module tell the sizes of its part."""
    own = sum(piece.stop - piece.start for piece in pieces_of(layer.segments, ranks.size, ranks.rank))
    names = {
        Style.COLUMN: ("out_features", "nf"),
        Style.ROW: ("in_features", "nx"),
    }.get(layer.style, ())
    for name in names:
        if hasattr(module, name):
            setattr(module, name, own)


class _Forwards:
    """Puts split forwards in the place of those of a model's modules.

    Attributes:
        entrances: of column-parallel layers, by the module that holds them.
    """

    def __init__(self, model: nn.Module, found: Found, ranks: TensorRanks, zones: Zones) -> None:
        self._model, self._found, self._ranks, self._zones = model, found, ranks, zones
        self._modules = dict(model.named_modules())
        self.entrances: dict[str, Entrance] = {}
        self._parameters: dict[str, Parameters] = {}

    def install(self) -> None:
        """Give each split layer its forward."""
        opened = {attention.name for attention in self._found.attentions}
        groups: dict[str, list[FoundLayer]] = defaultdict(list)
        for layer in self._found.layers:
            if layer.style is Style.COLUMN:
                groups[layer.name.rpartition(".")[0]].append(layer)
        for holder, layers in groups.items():
            for layer in layers:
                module = self._modules[layer.name]
                self._parameters[layer.name] = Parameters(module, is_transposed(module), self._sums(layer))
            overlaps = all(_replaced(self._modules[layer.name]) is None for layer in layers)
            parameters = [self._parameters[layer.name] for layer in layers]
            self.entrances[holder] = Entrance(
                self._ranks, self._zones, f"input of {layers[0].name}", parameters, holder in opened, overlaps
            )
        before: dict[str, Entrance] = {}
        for layer in self._found.layers:
            module: Any = self._modules[layer.name]
            if layer.style is Style.COLUMN:
                holder = layer.name.rpartition(".")[0]
                before[holder] = entrance = self.entrances[holder]
                plain = _replaced(module)
                module.forward = ColumnForward(module, entrance, self._zones, self._parameters[layer.name], plain)
            elif layer.style is Style.ROW:
                entrances, before = list(before.values()), {}
                transposed, plain = is_transposed(module), _replaced(module)
                module.forward = RowForward(
                    module, self._ranks, self._zones, layer.name, entrances, transposed, plain
                )
            elif layer.style is Style.EMBEDDING:
                split_embedding(module, self._ranks, *self._rows(layer), layer.name)
            elif layer.style is Style.OUTPUT:
                split_output(self._model, module, self._ranks, *self._rows(layer), layer.name)

    def _rows(self, layer: FoundLayer) -> tuple[int, int, int]:
        """Of a vocabulary: this rank's [start, stop), and the size of all."""
        (piece,) = pieces_of(layer.segments, self._ranks.size, self._ranks.rank)
        return piece.start, piece.stop, layer.segments[0].size

    def _sums(self, layer: FoundLayer) -> Any:
        """Adds up gradients of features that several ranks hold; None where none are."""
        if all(segment.parts >= self._ranks.size for segment in layer.segments):
            return None
        return partial(sum_copies, layer.segments, self._ranks, layer.name)


def sum_copies(segments: tuple[Segment, ...], ranks: TensorRanks, label: str, gradient: Tensor, dimension: int) -> Tensor:
    """The gradient [own features along `dimension`] with those of features that several ranks hold added up.

    One message has all copied segments whole, each rank's own part in its place and zeros elsewhere.
    """
    own = list(pieces_of(segments, ranks.size, ranks.rank))
    at = [0]
    for piece in own:
        at.append(at[-1] + piece.stop - piece.start)
    copied = [n for n, segment in enumerate(segments) if segment.parts < ranks.size]
    parts = [gradient.narrow(dimension, at[n], at[n + 1] - at[n]) for n in copied]
    firsts = [sum(segment.size for segment in segments[:n]) for n in range(len(segments))]
    shape = list(gradient.shape)
    shape[dimension] = sum(segments[n].size for n in copied)
    message, offset, places = gradient.new_zeros(shape), 0, []
    for n, part in zip(copied, parts, strict=True):
        place = message.narrow(dimension, offset + own[n].start - firsts[n], part.shape[dimension])
        place.copy_(part)
        places.append(place)
        offset += segments[n].size
    ranks.sum(message, f"gradient of {label}")
    for part, place in zip(parts, places, strict=True):
        part.copy_(place)
    return gradient


def _replaced(module: nn.Module) -> Any:
    """The forward that another technique has put in the place of a module's own; None if none has."""
    return vars(module).get("forward")
