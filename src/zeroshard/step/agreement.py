"""One rank's answer in the agreement on a step, as it is sent."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from zeroshard.errors import CommError
from zeroshard.parts.gradients import Gradients
from zeroshard.step.losses import REPORT, LossReport

HEAD = struct.Struct("<qId?")


class Answer(NamedTuple):
    """One rank's answer.

    Attributes:
        step: the steps that it has taken.
        digests: checksums of its gathers and of its reductions so far, and of those inside of each further axis.
        settings: a checksum of the optimizer's settings; 0 where there is one rank.
        squares: its share of the squared norm of the gradients.
        sound: whether its losses are finite.
        losses: its losses and counts.
        unreduced: the units with gradients that it has not reduced.
        written: by parameter, whether it got a gradient.
    """

    step: int
    digests: tuple[int, ...]
    settings: int
    squares: float
    sound: bool
    losses: LossReport
    unreduced: Sequence[int]
    written: bytes

    def pack(self, units: int) -> bytes:
        """The bytes that are sent, as many on all ranks; of a model of so many units."""
        head = HEAD.pack(self.step, self.settings, self.squares, self.sound)
        head += struct.pack(f"<{len(self.digests)}I", *self.digests)
        return head + REPORT.pack(*self.losses) + bytes(u in self.unreduced for u in range(units)) + self.written

    @classmethod
    def unpack(cls, frame: bytes, units: int, digests: int) -> "Answer":
        """The answer in these bytes, with so many digests."""
        step, settings, squares, sound = HEAD.unpack_from(frame)
        seen, start = struct.unpack_from(f"<{digests}I", frame, HEAD.size), HEAD.size + 4 * digests
        losses, flags = LossReport(*REPORT.unpack_from(frame, start)), frame[start + REPORT.size :]
        unreduced = [u for u in range(units) if flags[u]]
        return cls(step, seen, settings, squares, sound, losses, unreduced, flags[units:])


def written_flags(gradients: Gradients) -> bytes:
    """Of the parameters of a flat, whether they got a gradient; those without elements are for other ranks to tell."""
    entries = zip(gradients.flat.index.entries, gradients.written_in_step, strict=True)
    return bytes(written and entry.numel > 0 for entry, written in entries)


def check_together(answers: Sequence[Answer], groups: Sequence[Sequence[Sequence[int]]] = ()) -> None:
    """Check that all ranks are at the same step, after the same collectives.

    Args:
        groups: of each further axis, in the order of the answers' digests: the ranks that called layers together.

    Raises:
        CommError: they are not.
    """
    every = range(len(answers))
    pairs = [(0, rank, slice(2)) for rank in every]
    for number, of_axis in enumerate(groups, start=2):
        pairs += [(members[0], rank, slice(number, number + 1)) for members in of_axis for rank in members]
    for first, rank, compared in pairs:
        one, other = answers[first], answers[rank]
        if (one.step, one.digests[compared]) != (other.step, other.digests[compared]):
            raise CommError(
                f"The ranks disagree: rank {first} is at step {one.step} and rank {rank} at step {other.step}, "
                "or they gathered and reduced different units on the way. Every rank must call forward, backward "
                "and step equally often."
            )
