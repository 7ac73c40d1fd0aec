"""Checks between ranks: equal scripts, and equal replicas.

Ranks that differ in a width, a learning rate or a version would otherwise train meaningless weights, or fail inside a
collective without the reason. Replicas are compared by CRC-32, which finds every burst of up to 32 flipped bits and
misses one other change in 2**32. Ranks that share memory have one copy and nothing to compare.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import wait_for_ranks
from zeroshard.errors import DivergenceError
from zeroshard.parts.part import Part, Parts
from zeroshard.parts.place import Axis, boxes_of
from zeroshard.plan import Plan
from zeroshard.planning.settings import flat
from zeroshard.step.decision import compare, settings_of
from zeroshard.units.flat import digest_of
from zeroshard.version import __version__

OWN = {"device_memory", "offload.disk"}  # settings of a plan in which ranks on different machines may differ


def check_alike(comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Compare versions, plans, models and optimizers over all ranks: a collective call.

    Raises:
        CommError: they differ, with the fields, on all ranks; or a rank did not join.
    """
    wait_for_ranks(comm.mesh, "an engine")
    if comm.mesh.ranks > 1:
        compare(comm, dict(_facts(model, optimizer, plan)), "the engine's plan, model and optimizer")


def _facts(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Iterator[tuple[str, str]]:
    """Names and values of all settings that must be equal on all ranks."""
    yield "the version of zeroshard", __version__
    yield "the version of torch", str(torch.__version__)
    for name, value in flat(plan.as_dict()):
        if name not in OWN:
            yield f"plan.{name}", json.dumps(value, default=str)
    names = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        yield f"parameter '{name}'", _of_tensor(parameter) + ("" if parameter.requires_grad else ", frozen")
    for name, buffer in model.named_buffers():
        yield f"buffer '{name}'", _of_tensor(buffer)
    for name, others in sorted(tied_names(model).items()):
        yield f"the parameter that '{name}' is tied to", str(others)
    yield "the optimizer", f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    for number, group in enumerate(optimizer.param_groups):
        members = "\n".join(sorted(names.get(id(parameter), "?") for parameter in group["params"]))
        yield f"optimizer group {number}: parameters", f"{len(group['params'])} ({zlib.crc32(members.encode()):08x})"
    yield from settings_of(optimizer.param_groups)


def _of_tensor(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {kind}{' on the meta device' if tensor.is_meta else ''}"


def tied_names(model: nn.Module) -> dict[str, str]:
    """For parameters with several names, each further name and the first; made before the model is cut into stages."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: known for name, parameter in every if (known := first.setdefault(id(parameter), name)) != name}


LISTED = 5  # differences in an error
ENTRY = struct.Struct("<BI")  # the number of an axis, and a digest

Pieces = list[tuple[str, torch.Tensor]]  # (kind and parameter, values)


@dataclass(frozen=True, slots=True)
class Copied:
    """Named values that other ranks of an axis hold too."""

    axis: Axis
    pieces: Pieces


def copied(parts: Parts) -> Iterator[Copied]:
    """This rank's values that other ranks hold too."""
    for part in parts.all:
        place, weights, index = part.place, part.weights, part.flat.index
        if weights.copied:
            yield Copied(place.slices, _pieces(part, "parameter", weights.full, 0))
        with part.updater.at_hand():
            updated, columns = [*_masters(part), *_states(part)], [*_columns(part)]
        if columns:
            yield Copied(place.slices, columns)
        own = _pieces(part, "parameter", weights.own, index.interval(weights.rank)[0])
        for axis in (axis for axis in (place.copies, place.twins) if axis is not None):
            yield Copied(axis, [*own, *updated])
        everything = index.bounds is None and part.updater.values.numel() == index.padded_numel
        if place.copies is None and index.ranks > 1 and everything:
            yield Copied(place.slices, updated)


def check_replicas(parts: Parts, world: Comm, axes: Sequence[Axis]) -> None:
    """Compare values that must be equal on several ranks: a collective call of all ranks.

    These are full parameters at the stages that keep them, slices that several groups of ranks hold, and optimizer
    states that several ranks hold, and pieces of split tensors that several ranks have beside other pieces of them. Of
    weights with versions, the latest is compared.

    Raises:
        DivergenceError: on every rank, with the names of the parameters and the differing ranks.
    """
    mine = list(copied(parts))
    numbers = {axis.name: number for number, axis in enumerate(axes)}
    digests = b"".join(
        ENTRY.pack(numbers[each.axis.name], digest_of(values for _, values in each.pieces)) for each in mine
    )
    by_rank = [list(ENTRY.iter_unpack(digests)) for digests in world.agree(digests, "digests of the replicas")]
    differing: list[tuple[Sequence[int], int]] = []
    for number, axis in enumerate(axes):
        for ranks in (group for group in axis.groups if len(group) > 1):
            places = [n for n, (axis_number, _) in enumerate(by_rank[ranks[0]]) if axis_number == number]
            differing += [(ranks, n) for n in places if len({by_rank[rank][n] for rank in ranks}) > 1]
    found = _differing_pieces(parts, world)
    if not differing and not found:
        return
    own = {n for ranks, n in differing if world.mesh.rank in ranks}
    details = {str(n): _details(mine[n].pieces) for n in sorted(own)}
    answers = world.agree_on(details, "which parameters differ")
    found += [
        text for ranks, n in differing for text in _compare_replicas(ranks, [answers[rank][str(n)] for rank in ranks])
    ]
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    raise DivergenceError(
        f"Replicas are not the same any more: {'; '.join(found[:LISTED])}{more}. Go on from an earlier checkpoint; if "
        f"nothing wrote into the weights of single ranks, look for a fault in the machine of the rank that differs."
    )


def _differing_pieces(parts: Parts, world: Comm) -> list[str]:
    """Texts about differing pieces of split tensors (few key heads, each on several ranks)."""
    here = {name for part in parts.all for name, split in part.splits.items() if not split.counted}
    names = {name for told in world.agree_on(sorted(here), "pieces that several ranks have") for name in told}
    if not names:
        return []
    mine = {key: digest for part in parts.all for key, digest in _split_pieces(part, names)}
    answers = world.agree_on(mine, "digests of the pieces")
    holders: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        for key in answer:
            holders.setdefault(key, []).append(rank)
    texts = (_compare_replicas(ranks, [{key: answers[rank][key]} for rank in ranks]) for key, ranks in holders.items())
    return [text for each in texts for text in each]


def _split_pieces(part: Part, names: set[str]) -> Iterator[tuple[str, int]]:
    """Digests of this rank's pieces of some tensors, by kind, name and box."""
    index, weights = part.flat.index, part.weights
    numbers = {entry.name: number for number, entry in enumerate(index.entries)}

    def boxes(pieces: Pieces, start: int) -> Iterator[tuple[str, int]]:
        for text, values in pieces:
            name = text.rpartition(" ")[2]
            entry = index.entries[numbers[name]]
            split = part.splits.get(name) if name in names else None
            first = max(start - entry.offset, 0)
            for (box, inside), _ in boxes_of(entry.shape, split, first, values) if split is not None else ():
                yield f"{text}[{box}]", digest_of([inside.contiguous()])

    with part.updater.at_hand():
        own = index.interval(weights.rank)[0]
        yield from boxes(_pieces(part, "parameter", weights.own, own), own)
        yield from boxes(_masters(part), part.updater.start)
        for span in part.updater.spans:
            for key, value in part.updater.elements(span).items():
                yield from boxes(_pieces(part, f"{key} of", value, span.start), span.start)


def _compare_replicas(ranks: Sequence[int], answers: list[dict[str, int]]) -> Iterator[str]:
    """A text for each name whose digests differ between the ranks."""
    for name in dict.fromkeys(name for answer in answers for name in answer):
        sides: dict[int | None, list[int]] = {}
        for rank, answer in zip(ranks, answers, strict=True):
            sides.setdefault(answer.get(name), []).append(rank)
        most = max(sides.values(), key=len)
        if len(sides) == 1:
            continue
        if 2 * len(most) > len(ranks):
            others = [rank for rank in ranks if rank not in most]
            yield f"{name} on {_ranks(others)}, where {_ranks(most)} agree"
        else:
            yield f"{name}, {' against '.join(_ranks(side) for side in sides.values())}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _pieces(part: Part, kind: str, values: torch.Tensor, start: int) -> Pieces:
    """The parameters in `values`, which begin at `start` in the flat; without padding."""
    index = part.flat.index
    return [
        (f"{kind} {index.entries[number].name}", values[low - start : high - start])
        for number, low, high in index.overlaps(start, start + values.numel())
    ]


def _masters(part: Part) -> Pieces:
    updater = part.updater
    if not updater.separate:
        return []
    return _pieces(part, "master weights of", updater.exact(updater.values), updater.start)


def _states(part: Part) -> Iterator[tuple[str, torch.Tensor]]:
    """The optimizer's states of a part."""
    for span in part.updater.spans:
        for key, value in part.updater.elements(span).items():
            yield from _pieces(part, f"{key} of", value, span.start)
    for name, span in (part.updater.matrices or {}).items():
        yield from ((f"{key} of {name}", value) for key, value in part.updater.elements(span).items())


def _columns(part: Part) -> Iterator[tuple[str, torch.Tensor]]:
    """States of a row-split matrix that every rank holds whole, such as statistics of its columns."""
    for span in part.updater.spans:
        if span.rows is not None:
            name, own = part.flat.index.entries[0].name, span.rows.states
            for key, value in (part.updater.scalars(span) or {}).items():
                if key not in own and isinstance(value, torch.Tensor):
                    yield f"{key} of {name}", value.reshape(-1)


def _details(pieces: Pieces) -> dict[str, int]:
    """The digest of each parameter, by name."""
    by_name: dict[str, list[torch.Tensor]] = {}
    for name, values in pieces:
        by_name.setdefault(name, []).append(values)
    return {name: digest_of(values) for name, values in by_name.items()}
