"""The technique of tensor parallelism: it cuts a model's parameters and installs split forwards.

The tensor axis is the innermost in the numbering of ranks, as in PTD-P (2104.04473, section 3.4).
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
from zeroshard.parts.technique import NewAxis, neighbours
from zeroshard.parts.zones import DividedActivations, Division
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.platform.real import REAL
from zeroshard.tensor.find.explain import warn_of_whole, whole_share
from zeroshard.tensor.find.found import (
    FoundLayer,
    FoundLayers,
    Segment,
    Style,
    check_splits,
    pieces_of,
    refuse_copies,
    refuse_ignored,
)
from zeroshard.tensor.find.layers import find
from zeroshard.tensor.find.linear import linear_features
from zeroshard.tensor.policy import TensorParallel
from zeroshard.tensor.split.check_gradients import GradientCheck
from zeroshard.tensor.split.collectives import TensorRanks, Zones
from zeroshard.tensor.split.experts import fit_experts
from zeroshard.tensor.split.heads import RankBorders, fit_attention, fit_layer, head_dimension
from zeroshard.tensor.split.layers import ColumnForward, Entrance, Parameters, RowForward
from zeroshard.tensor.split.planned_messages import PlannedMessages, pairs_of
from zeroshard.tensor.split.returned import ReturnedActivations
from zeroshard.tensor.split.sequence import SequenceBlocks, open_attention
from zeroshard.tensor.split.vocabulary import split_embedding, split_output
from zeroshard.units.forwards import insert, inside, replaced
from zeroshard.units.hooks import Hook, in_place_of
from zeroshard.units.ignored import is_ignored

AXIS = "tensor"


class TensorTechnique:
    """Tensor parallelism of one model; a `parts.technique.Technique`.

    Args:
        transport: the plan's transport.
        moments: the plan's format of the optimizer's moments.

    Attributes:
        zones: zones of the model's forwards.
        found: the split layers, once the model is cut.
    """

    def __init__(self, policy: TensorParallel, transport: str = "network", moments: str = "fp32") -> None:
        self._policy, self._transport, self._moments = policy, transport, moments
        self.zones = Zones()
        self.found: FoundLayers | None = None

    def axes(self, ranks: int) -> Mapping[str, NewAxis]:
        """The tensor axis: groups of neighbouring ranks.

        Raises:
            PlanError: the groups do not divide the ranks.
        """
        return {AXIS: NewAxis(neighbours(ranks, self._policy.ranks, "tensor_parallel"), data=False)}

    def replicated_over(self, layer: str) -> str | None:
        """The tensor axis, unless sequence parallelism divides the positions of a layer's input."""
        return None if self._policy.sequence else AXIS

    def cut(self, model: nn.Module, axes: Mapping[str, Axis]) -> Mapping[nn.Parameter, Split | Partial]:
        """Replace parameters by this rank's parts, and forwards by split ones.

        Raises:
            PlanError, ModelError: a layer cannot be split as the plan says.
        """
        self.zones.axis = axes[AXIS]
        ranks = TensorRanks(axes[AXIS])
        share_operands(ranks.comm, self._transport)
        self.found = found = find(model, ranks.size, self._policy)
        check_splits(found, type(model).__name__, ranks.size)
        if ranks.comm.mesh.platform is REAL:
            warn_of_whole(whole_share(model, found, ranks.size), {name: axis.rank for name, axis in axes.items()})
        if self._moments == "8bit":
            refuse_copies(found, ranks.size)
        places = _Cutting(model, found, ranks, self._policy.sequence).places
        modules = dict(model.named_modules())
        forwards = _Forwards(model, found, ranks, self.zones)
        forwards.install()
        returned = ReturnedActivations(model, ranks, found.blocks, found.attentions)
        if self._policy.sequence:
            for stack in found.blocks:
                SequenceBlocks(model, [(name, modules[name]) for name in stack], ranks, self.zones, returned)
            for holder in forwards.opened:
                open_attention(modules[holder], holder, forwards.entrances[holder], self.zones)
        forwards.adapt()
        self._plan_messages(model, modules, forwards, ranks)
        model.register_forward_pre_hook(Hook(lambda *_: self.zones.reset()), prepend=True)
        named = {name: places[p] for name, p in model.named_parameters(remove_duplicate=False) if p in places}
        for name in (name for stack in found.blocks for name in stack):
            GradientCheck(modules[name], name, named, self.zones)
        return places

    def _plan_messages(
        self, model: nn.Module, modules: Mapping[str, nn.Module], forwards: "_Forwards", ranks: TensorRanks
    ) -> None:
        """Install the formulas of the blocks' traffic, if the model has them."""
        assert self.found is not None
        pairs = None if self.found.adapted else pairs_of(self.found, modules, ranks.size)
        if pairs and forwards.overlap and all(p.requires_grad for p in model.parameters()):
            PlannedMessages(pairs, modules, ranks, self.zones)


def share_operands(comm: Comm, transport: str) -> None:
    """Share operands among ranks by shared memory, if the plan's transport and the machine allow it.

    Raises:
        PlanError: transport='shared' is impossible here.
    """
    if transport == "network":
        return
    reason: str | None = "the ranks do not compute on CPUs"
    if not is_accelerator(comm.mesh.device):
        reason = comm.share_operands()
    if reason is not None and transport == "shared":
        raise PlanError(f"transport='shared' cannot be: {reason}. Or leave transport='auto'.")


class _Cutting:
    """The cut of a model's parameters.

    Attributes:
        places: place of each new or partial parameter.
    """

    def __init__(self, model: nn.Module, found: FoundLayers, ranks: TensorRanks, sequence: bool) -> None:
        self._ranks = ranks
        self.places: dict[nn.Parameter, Split | Partial] = {}
        modules = dict(model.named_modules())
        sites: dict[Any, list[tuple[nn.Module, str]]] = defaultdict(
            list
        )  # modules and names of each parameter; tied ones have several
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                sites[parameter].append((module, name))
        whole_sequences = [f"{name}." for name, _ in found.whole_sequences]
        inside = [f"{name}." for stack in found.blocks for name in stack] if sequence else []
        for layer in found.layers:
            module, path = modules[layer.name], f"{layer.name}."
            own_positions = path.startswith(tuple(inside)) and not path.startswith(tuple(whole_sequences))
            for name, parameter in list(module.named_parameters(recurse=False)):
                dimension = dimension_of(layer, module, name)
                apart = layer.partial or own_positions or layer.style is Style.EXPERTS
                if is_ignored(parameter):
                    divided = "" if dimension is None else "split"
                    refuse_ignored(
                        f"{path}{name}".lstrip("."), divided or "apart" * (apart and parameter.requires_grad)
                    )
                elif dimension is not None:
                    if parameter in self.places:
                        continue  # tied, and cut with another layer
                    part = self._part(parameter, layer, dimension, name)
                    for holder, attribute in sites[parameter]:
                        holder._parameters[attribute] = part
                elif apart:
                    self.places[parameter] = Partial(AXIS)
            self._tell_sizes(module, layer)
        for attention in found.attentions:
            for name, value in attention.sizes.items():
                setattr(modules[attention.name], name, value)

    def _part(self, whole: nn.Parameter, layer: FoundLayer, dimension: int, name: str) -> nn.Parameter:
        pieces = tuple(own_pieces(layer, self._ranks, None, name))
        values = torch.cat([whole.detach().narrow(dimension, p.start, p.stop - p.start) for p in pieces], dimension)
        part = in_place_of(whole, values.contiguous())
        by_rank = tuple(
            tuple(piece for piece in own_pieces(layer, self._ranks, rank, name) if piece.length)
            for rank in range(self._ranks.size)
        )
        held = by_rank[self._ranks.rank]
        self.places[part] = Split(AXIS, tuple(whole.shape), dimension, held, by_rank)
        return part

    def _tell_sizes(self, module: Any, layer: FoundLayer) -> None:
        """Set the attributes of sizes of linear layers, embeddings of heads and experts to those of the part."""
        for name, value in layer.sizes:
            setattr(module, name, value)
        own = sum(piece.stop - piece.start for piece in own_pieces(layer, self._ranks))
        for name in SIZES.get(layer.style, ()):
            if hasattr(module, name):
                setattr(module, name, own)


SIZES = {  # attributes with the features of a part
    Style.COLUMN: ("out_features", "nf"),
    Style.ROW: ("in_features", "nx"),
    Style.HEADS: ("embedding_dim",),
}


def own_pieces(layer: FoundLayer, ranks: TensorRanks, rank: int | None = None, parameter: str = "") -> Iterator[Piece]:
    """A rank's pieces of a layer's features or vocabulary, or of one parameter's; by default this rank's."""
    if layer.style in (Style.EMBEDDING, Style.OUTPUT):
        yield Piece(*ranks.rows(layer.segments[0].size, rank))
    else:
        yield from pieces_of(layer.segments_of(parameter), ranks.size, ranks.rank if rank is None else rank)


def dimension_of(layer: FoundLayer, module: nn.Module, name: str) -> int | None:
    """The dimension along which a parameter of a layer is cut; None for a whole one."""
    match layer.style:
        case Style.WHOLE:
            return None
        case Style.ROW:
            return None if name == "bias" else 1 - output_dimension(module)
        case Style.COLUMN:
            return 0 if name == "bias" else output_dimension(module)
        case Style.HEADS:
            return head_dimension(module)
        case Style.EXPERTS:
            return next((cut.dimension for cut in layer.cuts if cut.name == name and cut.segments), None)
        case _:
            return 0


def output_dimension(module: nn.Module) -> int:
    """The dimension of a linear layer's weight along which its output features lie."""
    features = linear_features(module)
    assert features is not None
    return features.dimension


class _Forwards:
    """The split forwards of a model's modules.

    Attributes:
        entrances: of column-parallel layers, by the module that holds them.
        opened: those of these modules that mix positions.
        overlap: whether all their sums overlap the weights' gradients.
    """

    def __init__(self, model: nn.Module, found: FoundLayers, ranks: TensorRanks, zones: Zones) -> None:
        self._model, self._found, self._ranks, self._zones = model, found, ranks, zones
        self._modules = dict(model.named_modules())
        self._rows = {column: layer for layer in found.layers for column in layer.columns}
        self.entrances: dict[str, Entrance] = {}
        self.opened: list[str] = []
        self.overlap = True

    def install(self) -> None:
        """Install the forward of each split layer."""
        groups: dict[str, list[FoundLayer]] = defaultdict(list)
        for layer in self._found.layers:
            if layer.style is Style.COLUMN:
                groups[_holder(layer.name)].append(layer)
        for attention in self._found.attentions:
            around = [holder for holder in groups if f"{attention.name}.".startswith(f"{holder}.")]
            self.opened += [max(around, key=len)] if around else []
        self.opened = list(dict.fromkeys(self.opened))  # several modules of one attention have sizes
        for holder, layers in groups.items():
            self._enter(holder, layers, holder in self.opened)
        for layer in self._found.layers:
            module: Any = self._modules[layer.name]
            if layer.style is Style.ROW:
                entrances = list(dict.fromkeys(self.entrances[_holder(name)] for name in layer.columns))
                transposed = bool(output_dimension(module))
                row = RowForward(module, self._ranks, self._zones, layer.name, entrances, transposed)
                insert(module, "divided", row.around)
            elif layer.style is Style.EMBEDDING:
                split_embedding(module, self._ranks, *self._vocabulary(layer), layer.name)
            elif layer.style is Style.OUTPUT:
                split_output(self._model, module, self._ranks, *self._vocabulary(layer), layer.name)

    def adapt(self) -> None:
        """Adapt modules to this rank's heads beyond their sizes (`heads`)."""
        borders, ranks, rank = RankBorders(self._ranks), self._ranks.size, self._ranks.rank
        for layer in self._found.layers:
            fit_layer(self._modules[layer.name], layer, borders, ranks, rank)
            if layer.style is Style.EXPERTS:
                fit_experts(self._modules[layer.name], layer, borders, ranks)
        for attention in self._found.attentions:
            if attention.arguments or attention.narrow:
                entrance = self.entrances[attention.name]
                fit_attention(self._modules[attention.name], attention, borders, ranks, rank, entrance)

    def _vocabulary(self, layer: FoundLayer) -> tuple[int, int, int]:
        """This rank's rows [start, stop) of a vocabulary, and its total size."""
        total = layer.segments[0].size
        return (*self._ranks.rows(total), total)

    def _enter(self, holder: str, layers: list[FoundLayer], opened: bool) -> None:
        """Install the forwards of one module's column-parallel layers."""
        modules: list[Any] = [self._modules[layer.name] for layer in layers]
        parameters = [
            Parameters(module, bool(output_dimension(module)), self._sums(layer))
            for module, layer in zip(modules, layers, strict=True)
        ]
        overlaps = all(replaced(module, inside(module, "divided")) is None for module in modules)
        self.overlap &= overlaps
        label = f"input of {layers[0].name}"
        entrance = Entrance(self._ranks, self._zones, label, parameters, opened, overlaps)
        self.entrances[holder] = entrance
        for layer, module, each in zip(layers, modules, parameters, strict=True):
            columns = divided_columns(layer, self._rows.get(layer.name), self._ranks)
            insert(module, "divided", ColumnForward(module, entrance, self._zones, each, columns).around)

    def _sums(self, layer: FoundLayer) -> Any:
        """A function that sums gradients of features with copies on several ranks; None without copies."""
        if all(segment.copies(self._ranks.size) == 1 for segment in layer.segments):
            return None
        return partial(sum_copies, layer.segments, self._ranks, layer.name)


def divided_columns(layer: FoundLayer, row: FoundLayer | None, ranks: TensorRanks) -> DividedActivations:
    """This rank's features and heads of a column-parallel layer's output.

    Args:
        row: the row-parallel layer behind it, or None; it reads the heads of all queries.
    """
    features, heads = _divisions(layer, ranks), []
    for each in (*(_divisions(row, ranks) if row is not None else ()), *features):
        numbers = (each.whole, each.first, each.size)
        if layer.head_size and not any(number % layer.head_size for number in numbers):
            heads.append(Division(*(number // layer.head_size for number in numbers)))
    return DividedActivations(heads=tuple(heads), features=tuple(features))


def _divisions(layer: FoundLayer, ranks: TensorRanks) -> list[Division]:
    """This rank's range of each segment of a layer's features; empty if some segments are not on all ranks."""
    found, first = [], 0
    if any(segment.ranks is not None for segment in layer.segments):
        return []
    for segment, piece in zip(layer.segments, own_pieces(layer, ranks), strict=True):
        found.append(Division(segment.size, piece.start - first, piece.stop - piece.start))
        first += segment.size
    return found


def _holder(name: str) -> str:
    """The path of a module's parent."""
    return name.rpartition(".")[0]


def sum_copies(
    segments: tuple[Segment, ...], ranks: TensorRanks, label: str, gradient: Tensor, dimension: int
) -> Tensor:
    """The gradient [own features along `dimension`], with features that have copies on several ranks summed over them.

    One message has all copied segments whole, with each rank's own part and zeros elsewhere.
    """
    own = list(pieces_of(segments, ranks.size, ranks.rank))
    at = [0]
    for piece in own:
        at.append(at[-1] + piece.stop - piece.start)
    copied = [n for n, segment in enumerate(segments) if segment.copies(ranks.size) > 1]
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
