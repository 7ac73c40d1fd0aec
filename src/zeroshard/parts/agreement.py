"""One rank's answer in the agreement on a step, as it is sent."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from zeroshard.errors import CommError
from zeroshard.parts.losses import REPORT, LossReport

HEAD = struct.Struct("<qIIId?")


class Answer(NamedTuple):
    """One rank's answer.

    Attributes:
        step: the steps that it has taken.
        digests: checksums of its gathers and of its reductions so far.
        settings: a checksum of the optimizer's settings; 0 where there is one rank.
        squares: its share of the squared norm of the gradients.
        sound: whether its losses are finite.
        losses: its losses and counts.
        unreduced: the units with gradients that it has not reduced.
        written: by parameter, whether it got a gradient.
    """

    step: int
    digests: tuple[int, int]
    settings: int
    squares: float
    sound: bool
    losses: LossReport
    unreduced: Sequence[int]
    written: bytes

    def pack(self, units: int) -> bytes:
        """The bytes that are sent, as many on all ranks; of a model of so many units."""
        head = HEAD.pack(self.step, *self.digests, self.settings, self.squares, self.sound)
        return head + REPORT.pack(*self.losses) + bytes(u in self.unreduced for u in range(units)) + self.written

    @classmethod
    def unpack(cls, frame: bytes, units: int) -> "Answer":
        """The answer in these bytes."""
        step, gathers, reductions, settings, squares, sound = HEAD.unpack_from(frame)
        losses, flags = LossReport(*REPORT.unpack_from(frame, HEAD.size)), frame[HEAD.size + REPORT.size :]
        unreduced = [u for u in range(units) if flags[u]]
        return cls(step, (gathers, reductions), settings, squares, sound, losses, unreduced, flags[units:])


def check_together(answers: Sequence[Answer]) -> None:
    """Check that all ranks are at the same step, after the same collectives.

    Raises:
        CommError: they are not.
    """
    for rank, answer in enumerate(answers):
        if (answer.step, answer.digests) != (answers[0].step, answers[0].digests):
            raise CommError(
                f"The ranks disagree: rank 0 is at step {answers[0].step} and rank {rank} at step {answer.step}, "
                "or they gathered and reduced different units on the way. Every rank must call forward, backward "
                "and step equally often."
            )
