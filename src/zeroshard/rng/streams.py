"""Torch's streams for split layers: one shared by all ranks of a tensor group, and one for each rank.

Activations that are equal on all ranks of the group need equal numbers, divided ones need different numbers
(Megatron-LM, tensor_parallel/random.py, keeps a second state of the generator for that). Here no second state is kept:
each stream is seeded anew at each border of zones, and its seed contains all data for the next border.

[Note: seeds of zones] When a forward begins, a number is made from the state of torch's generator, which is restored,
one number on, at the end. Inside, the generator's seed has four fields:

    bits 55 to 62   TAG: a forward of split layers is under way
    bits 52 to 54   the zone around split layers, and the one inside of it
    bits 0 to 51    number of the forward and count of its borders, mixed, with the rank if activations are divided

Every method of recomputation restores the state of the generator, and with it the seed, to that at the start of its
region. So a recomputed region repeats the draws of its forward, wherever it starts and ends, in both streams; and a
checkpoint of a run needs no further state.
"""

import ctypes
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint import rng
from zeroshard.comm.collectives import Comm
from zeroshard.errors import PlanError
from zeroshard.parts.part import MicrobatchRows
from zeroshard.parts.zones import ActivationZones, Zone
from zeroshard.platform import accelerator
from zeroshard.units.hooks import outside

TAG, TAG_AT, ZONES_AT = 0x35, 55, 52
MIXED, HALF, BORDERS = (1 << ZONES_AT) - 1, ZONES_AT // 2, 16  # bits of the count of borders
INSIDE = {Zone.WHOLE: 0, Zone.COLUMNS: 1, Zone.SEQUENCE: 2}
AROUND = 4  # the bit of SEQUENCE around split layers
ODD = (0xD1342543DE82F & MIXED, 0x2545F4914F6CD & MIXED)
INVERSE: tuple[int, int] = (pow(ODD[0], -1, MIXED + 1), pow(ODD[1], -1, MIXED + 1))
OF_RANK = 0x9E3779B97F4A7 & MIXED  # distance of the numbers of neighbouring ranks: the golden ratio
KNOWN = ("torch", "transformers", "zeroshard")  # packages whose modules draw at a rate that is an attribute
RATES = re.compile(r"drop|jitter|noise|mask_\w+_prob|^p$")
ALWAYS = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class RankStreams:
    """The streams of one model; a `parts.part.RandomNumbers`.

    Args:
        zones: the zones, which report their borders.
        comm: of the tensor ranks.
    """

    def __init__(self, model: nn.Module, zones: ActivationZones, comm: Comm) -> None:
        zones.moved = self._moved
        self._zones, self._comm, self._device, self._steps = zones, comm, comm.mesh.device, 0
        self._draws = _Drawing(model)
        self._seeded = torch.Generator(self._device) if accelerator.is_accelerator(self._device) else None
        self._before: tuple[Tensor, Tensor | None] | None = None  # of torch's generators outside of the model
        self._given = False  # whether the forward is that of an order
        self._equal = False  # whether the ranks' generators were made equal
        model.register_forward_pre_hook(outside(self._enter), prepend=True)
        model.register_forward_hook(outside(self._leave), always_call=True)

    def number(self, parts: Sequence[Any]) -> list[MicrobatchRows | None]:
        """None for each microbatch: rows have no numbers; a collective call in some steps, as `end_step`."""
        self.end_step()
        return [None] * len(parts)

    @contextmanager
    def microbatch(self, rows: MicrobatchRows | None) -> Iterator[None]:
        """Treat the forwards inside as one."""
        self._begin()
        self._given = True
        try:
            yield
        finally:
            self._given = False
            self._end()

    def again(self, module: nn.Module) -> AbstractContextManager[None]:
        """Nothing to do: torch's generators hold the state ([Note: seeds of zones])."""
        return nullcontext()

    def discard(self) -> None:
        """Nothing to do: streams continue."""

    def end_step(self) -> None:
        """Compare the ranks' generators of torch at steps 1, 2, 4, 8, ...; a collective call then.

        Raises:
            PlanError: they differ, so that activations which must be equal would not be.
        """
        self._steps += 1
        if self._steps & (self._steps - 1) or not self._equal:
            return
        digests = self._comm.agree(_digest(torch.get_rng_state()), "random numbers of a tensor group")
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise PlanError(
                f"Torch's random number generators differ between ranks 0 and {other} of a group of "
                f"{self._comm.mesh.ranks} ranks that split layers among themselves (tensor parallelism), so that they "
                f"drop other elements of activations which have to be equal. They were made equal before the first "
                f"forward; from there on seed them alike, as torch.manual_seed(seed + engine.data_rank), and draw on "
                f"all of them what you draw on one; or use rng='exact'."
            )

    def _moved(self, zone: Zone | None, around: bool) -> None:
        """Switch streams at a border of zones; a `Moved`."""
        seed = torch.default_generator.initial_seed()
        if seed >> TAG_AT != TAG:
            return
        now = seed >> ZONES_AT & 7
        if around:
            then = AROUND | INSIDE[Zone.SEQUENCE] if zone is Zone.SEQUENCE else 0
        elif zone is None:
            then = AROUND | INSIDE[Zone.SEQUENCE] if now & AROUND else 0
        else:
            then = now & AROUND | INSIDE[zone]
        if then != now:
            place = _separated(seed & MIXED, self._offset(now))
            border = place + 1 & (1 << BORDERS) - 1
            self._seed(then, place >> BORDERS << BORDERS | border)

    def _enter(self, *_: Any) -> None:
        if not self._given:
            self._begin()

    def _leave(self, *_: Any) -> None:
        if not self._given:
            self._end()

    def _begin(self) -> None:
        """Begin a forward; the first is a collective call."""
        self._end()  # of one that was interrupted
        self._zones.reset()
        if self._draws.now():
            if not self._equal:
                equalise(self._comm)
                self._equal = True
            state = torch.get_rng_state()
            self._before = state, accelerator.random_state(self._device)
            self._seed(0, int.from_bytes(_digest(state)) >> BORDERS << BORDERS & MIXED)

    def _end(self) -> None:
        if self._before is not None:
            state, of_device = self._before
            self._before = None
            torch.set_rng_state(state)
            torch.empty((), dtype=torch.int64).random_()  # so that the next forward's number differs
            accelerator.set_random_state(self._device, of_device)

    def _seed(self, zones: int, place: int) -> None:
        """Seed the stream of a zone."""
        seed = TAG << TAG_AT | zones << ZONES_AT | _mixed(place, self._offset(zones))
        torch.default_generator.manual_seed(seed)
        if self._seeded is not None:
            accelerator.set_random_state(self._device, self._seeded.manual_seed(seed).get_state())

    def _offset(self, zones: int) -> int:
        """The offset of the rank's own stream; 0 in the shared stream."""
        return (self._comm.mesh.rank + 1) * OF_RANK if zones & ~AROUND else 0


def equalise(comm: Comm) -> None:
    """Copy the first rank's generators to all ranks with the same data: torch's, Python's, numpy's.

    A collective call.
    """
    own = list(rng.streams(comm.mesh.device))
    content = b"".join(_bytes(state) for _, state in own)
    first = comm.agree(content, "random numbers of a tensor group at first")[0]
    if first != content:
        for name, state in own:
            mine, first = first[: state.nbytes], first[state.nbytes :]
            rng.restore(name, torch.frombuffer(bytearray(mine), dtype=torch.uint8), comm.mesh.device)


class _Drawing:
    """Whether a model may draw: a cheap check at each forward, since rates may change.

    Modules of other packages may always draw.
    """

    def __init__(self, model: nn.Module) -> None:
        self._may: list[nn.Module] = []
        self._rates: list[tuple[nn.Module, dict[str, Any], str]] = []
        configs: set[int] = set()
        for module in model.modules():
            kind = type(module)
            if isinstance(module, ALWAYS) or kind.__module__.partition(".")[0] not in KNOWN:
                self._may.append(module)
            config = getattr(module, "config", None)
            tables = [vars(module)]
            if hasattr(config, "__dict__") and id(config) not in configs:
                configs.add(id(config))
                tables.append(vars(config))
            for table in tables:
                names = (name for name, value in table.items() if RATES.search(name) and _is_number(value))
                self._rates += [(module, table, name) for name in names]

    def now(self) -> bool:
        """Whether it may draw in its present mode."""
        if any(module.training for module in self._may):
            return True
        return any(table.get(name) and module.training for module, table, name in self._rates)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bytes(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)  # in a rehearsal too, whose tensors have no values


def _digest(state: Tensor) -> bytes:
    return hashlib.blake2b(_bytes(state), digest_size=8).digest()


def _mixed(place: int, offset: int) -> int:
    """A mixed 52-bit number; `_separated` inverts it."""
    mixed = (place * ODD[0] + offset) & MIXED
    mixed = (mixed ^ mixed >> HALF) * ODD[1] & MIXED
    return mixed ^ mixed >> HALF


def _separated(mixed: int, offset: int) -> int:
    mixed = (mixed ^ mixed >> HALF) * INVERSE[1] & MIXED
    return ((mixed ^ mixed >> HALF) - offset) * INVERSE[0] & MIXED
