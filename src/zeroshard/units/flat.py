"""A flat buffer, its index table, norms and checksums, and the user's parameters, which are views into it."""

import bisect
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from zeroshard.units.find import Unit
from zeroshard.units.watched_parameters import WatchedParameter, set_values, values_of

TILE = 2**16  # elements; torch would first copy a whole 16-bit vector to fp32, beyond the size of the caches
CHUNK = 2**24  # bytes copied to the host at a time
SMALL = 2**14  # elements, up to which Python takes longer per tensor than a copy


def is_small(numel: int) -> bool:
    """Whether a parameter is so small that many such are best handled at once."""
    return numel <= SMALL


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter in a flat buffer.

    Attributes:
        name: the parameter's name in the user's model (of tied parameters, the first).
        shape: its shape.
        offset: its first element in the buffer.
        numel: its number of elements.
    """

    name: str
    shape: torch.Size
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        """One past its last element in the buffer."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Index:
    """The table of a flat buffer: parameters one after the other, and the slice of each rank.

    Slices are even, rank r's is [r*S, (r+1)*S), and padding shorter than `ranks` fills the last; or they lie between
    borders of parameters, or of rows of one, so that each rank owns whole ones, without padding (ragged slices, as in
    veScale's FSDP).

    Attributes:
        entries: the parameters.
        ranks: among which the buffer is sliced.
        bounds: the `ranks` + 1 places between which uneven slices lie; None for even ones.
    """

    entries: tuple[Entry, ...]
    ranks: int
    bounds: tuple[int, ...] | None = None

    @classmethod
    def of(cls, parameters: list[tuple[str, torch.Size]], ranks: int, bounds: tuple[int, ...] | None = None) -> "Index":
        """Lay out named shapes one after the other."""
        entries, offset = [], 0
        for name, shape in parameters:
            entries.append(Entry(name, shape, offset, shape.numel()))
            offset += shape.numel()
        assert bounds is None or (bounds[0], bounds[-1], len(bounds)) == (0, offset, ranks + 1), bounds
        return cls(tuple(entries), ranks, bounds)

    @property
    def numel(self) -> int:
        """Elements that hold parameters."""
        return self.entries[-1].stop if self.entries else 0

    @property
    def padded_numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return -(-self.numel // self.ranks) * self.ranks if self.bounds is None else self.numel

    @property
    def padding(self) -> int:
        """Elements without a parameter, at the end of the buffer."""
        return self.padded_numel - self.numel

    def interval(self, rank: int) -> tuple[int, int]:
        """First and one past the last element of a rank's slice."""
        if self.bounds is not None:
            return self.bounds[rank], self.bounds[rank + 1]
        size = self.padded_numel // self.ranks
        return rank * size, (rank + 1) * size

    def slice_numel(self, rank: int) -> int:
        """Elements of a rank's slice, padding included."""
        start, stop = self.interval(rank)
        return stop - start

    def share(self, rank: int) -> tuple[Fraction, Fraction]:
        """Elements and padding of a rank's slice by the formula, with the padding of even slices in equal shares."""
        if self.bounds is not None:
            return Fraction(self.slice_numel(rank)), Fraction(0)
        return Fraction(self.numel, self.ranks), Fraction(self.padding, self.ranks)

    def padding_in(self, start: int, stop: int) -> int:
        """Number of padding elements in [start, stop)."""
        return max(0, stop - max(start, self.numel))

    def number_at(self, element: int) -> int:
        """The number of the parameter that holds `element`; for padding, of the last one."""
        return max(0, bisect.bisect_right(self.entries, element, key=lambda entry: entry.offset) - 1)

    def borders(self, chosen: bytes) -> list[int]:
        """First elements of the runs of `chosen` and of other parameters, without the first run."""
        ends = zip(chosen, chosen[1:], self.entries[1:], strict=False)
        return [entry.offset for before, after, entry in ends if before != after]

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(number, first, one past the last element in the buffer) of every parameter in [start, stop)."""
        for number, entry in enumerate(self.entries):
            low, high = max(start, entry.offset), min(stop, entry.stop)
            if low < high:
                yield number, low, high


class Flat:
    """The parameters of one unit that share dtype and trainability, one after the other in one buffer.

    The technique that decides on residency (ZeRO, offload) owns the buffer; a flat makes the parameters views of it.
    `detach` leaves each parameter with its shape and NaN for values, and refuses writes.

    Args:
        ranks: that slice it.
        kind: of its place, for the label; empty for dense parameters.
        bounds: between which uneven slices lie; None for even ones.

    Attributes:
        unit: of the parameters.
        index: the table of names, shapes and offsets.
        dtype: of the parameters as the model computes with them.
        trainable: whether they get gradients and an update.
        label: the name in messages and tables, with dtype and kind, since a unit may have several flats.
        parameters: the user's `nn.Parameter` objects, in the order of the index.
        views: the view of the buffer for each parameter.
        kinds: the classes of watched parameters, while their values are present and while they are absent.
        replaced: the numbers of parameters whose memory the user replaced (`p.data = values`).
        first_small: the number from which on all parameters are small; at least 1.
    """

    def __init__(
        self,
        unit: Unit,
        parameters: dict[str, nn.Parameter],
        dtype: torch.dtype,
        trainable: bool,
        ranks: int,
        kind: str = "",
        bounds: tuple[int, ...] | None = None,
    ) -> None:
        self.unit = unit
        self.index = Index.of([(name, parameter.shape) for name, parameter in parameters.items()], ranks, bounds)
        self.dtype = dtype
        self.trainable = trainable
        kinds = [str(dtype).removeprefix("torch."), "" if trainable else "frozen", kind]
        self.label = f"{unit.label}[{', '.join(filter(None, kinds))}]"
        self.parameters = list(parameters.values())
        big = [number for number, parameter in enumerate(self.parameters) if not is_small(parameter.numel())]
        self.first_small = max([0, *big]) + 1
        self.views: list[torch.Tensor] = []
        self.kinds: tuple[type[nn.Parameter], type[nn.Parameter]] | None = None
        self.replaced: set[int] = set()
        self._absent = torch.empty(())
        self._nowhere: list[torch.Tensor] = []  # `_absent` in the shapes of the parameters
        self._aliases: dict[int, torch.Tensor] = {}  # the tensors behind `p.data`, by number
        self._lent: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._past_edits = 0
        self._addresses: list[int] = []  # of the views at the last call of `moved`

    def precise_dtype(self, least: torch.dtype | None = None) -> torch.dtype:
        """The widest dtype of the flat and of the user's parameters in it, and of `least`."""
        dtype = self.dtype if least is None else torch.promote_types(self.dtype, least)
        for parameter in self.parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype

    def view(self, buffer: torch.Tensor, number: int) -> torch.Tensor:
        """The part of `buffer` [padded] that holds parameter `number`, in its shape."""
        entry = self.index.entries[number]
        return buffer[entry.offset : entry.stop].view(entry.shape)

    def bind(self, buffer: torch.Tensor) -> None:
        """Make `buffer` [padded] the storage of the parameters; `attach` points them at it."""
        self.views = [self.view(buffer, number) for number in range(len(self.parameters))]
        self._absent = torch.full((), float("nan") if self.dtype.is_floating_point else 0, device=buffer.device).to(
            self.dtype
        )
        self._nowhere = []

    def watch(self, kinds: tuple[type[nn.Parameter], type[nn.Parameter]], present: bool) -> None:
        """Make the parameters watched ones ([Note: watched parameters]); parameters of other classes stay as they are.

        Args:
            present: whether their values are on this rank now.
        """
        if all(
            type(parameter) is nn.Parameter or isinstance(parameter, WatchedParameter) for parameter in self.parameters
        ):
            self.kinds = kinds
            self._show(present)

    def unwatch(self) -> None:
        """Make the parameters ordinary ones again, for another flat of them."""
        for parameter in self.parameters if self.kinds is not None else ():
            parameter.__class__ = nn.Parameter
        self.kinds = None

    def attach(self) -> None:
        """Point every parameter at the buffer, which holds its values."""
        self._show(present=True)
        self._put(self.views)
        self.replaced.clear()

    def detach(self) -> None:
        """Point the parameters at one NaN, expanded to their shapes, instead of the buffer."""
        if not self._nowhere:
            self._nowhere = [self._absent.expand(entry.shape) for entry in self.index.entries]
        self._put(self._nowhere)
        self._show(present=False)

    def _put(self, values: Iterable[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # halves the time
            for parameter, tensor in zip(self.parameters, values, strict=True):
                set_values(parameter, tensor)

    def _show(self, present: bool) -> None:
        if self.kinds is not None:
            kind = self.kinds[0 if present else 1]
            for parameter in self.parameters:
                parameter.__class__ = kind

    def alias(self, number: int) -> torch.Tensor:
        """The value of `p.data`: a detached tensor over the same memory, whose writes count as edits."""
        values = values_of(self.parameters[number])
        known = self._aliases.get(number)
        if known is None or not known.is_set_to(values):
            self._past_edits += known._version if known is not None else 0
            known = self._aliases[number] = values
        lent = known.detach()
        others = [other for other in self._lent.get(number, ()) if other() is not None]
        self._lent[number] = [*others, weakref.ref(lent)]
        return lent

    def take_over(self, number: int) -> None:
        """Copy the values of a parameter whose memory was replaced into the buffer, and point it at the buffer again.

        Tensors that `p.data` returned before keep their values, in memory of their own.
        """
        parameter, view = self.parameters[number], self.views[number]
        values = values_of(parameter)
        lent = [tensor for ref in self._lent.pop(number, ()) if (tensor := ref()) is not None]
        kept = None
        for tensor in lent:
            if tensor.is_set_to(view):
                kept = view.clone() if kept is None else kept
                set_values(tensor, kept)
        view.copy_(values)
        self.restore(number)
        self._past_edits += 1

    def restore(self, number: int) -> None:
        """Point a parameter at the buffer again, with the buffer's values."""
        set_values(self.parameters[number], self.views[number])
        self.replaced.discard(number)

    def moved(self) -> list[int]:
        """The numbers of the parameters that do not view the buffer."""
        if list(map(torch.Tensor.data_ptr, self.parameters)) == self._addresses:
            return []
        self._addresses = list(map(torch.Tensor.data_ptr, self.views))
        pairs = zip(self.parameters, self.views, strict=True)
        return [number for number, (parameter, view) in enumerate(pairs) if parameter.data_ptr() != view.data_ptr()]

    @property
    def aliases(self) -> int:
        """Number of tensors over the buffer that are kept for `p.data`."""
        return sum(alias.is_set_to(self.views[number]) for number, alias in self._aliases.items())

    @property
    def edits(self) -> int:
        """Number of writes in place to the parameters so far, also through `p.data`."""
        versions = sum(parameter._version for parameter in self.parameters)
        if self._aliases:
            versions += sum(alias._version for alias in self._aliases.values())
        return versions + self._past_edits


def written_while_absent(flats: Sequence[Flat]) -> list[int]:
    """The numbers of the flats of which a parameter was written while its values were absent (`fill_` is not refused).

    The host waits once for the device, for all of them.
    """
    floats = [number for number, flat in enumerate(flats) if flat.dtype.is_floating_point]
    if not floats:
        return []
    absent = torch.stack([flats[number]._absent.float() for number in floats]).isnan()
    return [] if bool(absent.all()) else [floats[number] for number in (~absent).nonzero().flatten().tolist()]


def norm_of(values: torch.Tensor) -> torch.Tensor:
    """The 2-norm of a vector [n] as a scalar, computed in fp32 at least."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    valueless = values.untyped_storage().device.type == "meta"  # in a rehearsal
    if values.device.type != "cpu" or values.dtype == dtype or valueless:
        whole: torch.Tensor = torch.linalg.vector_norm(values, dtype=dtype)
        return whole
    parts = [torch.linalg.vector_norm(part, dtype=dtype) for part in values.split(TILE)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return norm


def wide_norm(values: torch.Tensor, kind: float = 2.0) -> float:
    """The p-norm of values, real or complex, for p = `kind`, computed in fp64."""
    dtype = torch.promote_types(values.dtype, torch.float64)
    return float(torch.linalg.vector_norm(values, kind, dtype=dtype))


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 of the bytes of 1-D tensors, one after the other."""
    crc = 0
    for tensor in tensors:
        raw = tensor.detach().view(torch.uint8)
        for start in range(0, raw.numel(), CHUNK):
            crc = zlib.crc32(raw[start : start + CHUNK].cpu().numpy().data, crc)
    return crc
