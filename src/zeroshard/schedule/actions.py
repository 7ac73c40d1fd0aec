"""Actions: the steps of one rank, one after the other, each one word of a small grammar.

An action is written `KIND chunk [. microbatch] @ version [> or < peer]`:

    F3.2@0          forward of microbatch 2 through chunk 3 with weight version 0
    B3.2@0          its backward; or in two parts, I3.2@0 (gradient of the input) and W3.2@0 (of the weights)
    RECV_F3.2@0<2   post the receive of that forward's input from rank 2
    SEND_F3.2@0>4   send its output to rank 4, which holds chunk 4
    RECV_B3.2@0<4   post the receive of its output's gradient; SEND_B3.2@0>2 sends that of its input
    SEND_F0.2@0>3   of four stages: send values that chunks 1 and 2 do not read to chunk 3 ([Note: skips])
    GATHER3@0       begin to gather chunk 3's units for use (ZeRO 3); FREE3@0 ends that
    REDUCE3.2@0     reduce its gradients up to microbatch 2 over the replicas, except those that the backward before it
                    has begun to reduce
    UPDATE3@0       make version 1 of the weights from version 0
    DROP3@0         free version 0, which no later forward or backward uses
    REPAY3.2@0>0    send to rank 0 the gradient of the weights that chunk 3 borrows from it
    COLLECT0.2@0<3  wait for that gradient, and add it to chunk 0's
    LEND0@1>3       send version 1 of the lent weights to rank 3
    BORROW3.5@1<0   post their receive; the forward of microbatch 5 waits for it
"""

import re
from enum import StrEnum
from typing import NamedTuple

from zeroshard.errors import PlanError


class Kind(StrEnum):
    """Kinds of actions."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    GATHER = "GATHER"
    FREE = "FREE"
    REDUCE = "REDUCE"
    UPDATE = "UPDATE"
    DROP = "DROP"
    REPAY = "REPAY"
    COLLECT = "COLLECT"
    LEND = "LEND"
    BORROW = "BORROW"


COMPUTE = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT))
BACKWARDS = frozenset((Kind.BACKWARD, Kind.INPUT_GRADIENT))  # they need the gradient of the output
SENDS = frozenset((Kind.SEND_FORWARD, Kind.SEND_BACKWARD, Kind.REPAY, Kind.LEND))
RECEIVES = frozenset((Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD, Kind.COLLECT, Kind.BORROW))


class Action(NamedTuple):
    """One action of one rank on one chunk of the model, with the weight version that it uses.

    Attributes:
        chunk: number of the chunk in the whole model, from the first layers to the last.
        microbatch: number of the microbatch among those of all replicas; None for an action without one.
        version: of the chunk's weights, counted in updates since the start of the list.
        peer: the rank at the other end of a message.
    """

    kind: Kind
    chunk: int = 0
    microbatch: int | None = None
    version: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f".{self.microbatch}"
        peer = "" if self.peer is None else f"{'>' if self.kind in SENDS else '<'}{self.peer}"
        return f"{self.kind}{self.chunk}{microbatch}@{self.version}{peer}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that prints as `text`.

        Raises:
            PlanError: the text is no action.
        """
        match = re.fullmatch(r"([A-Z]+(?:_[FB])?)(\d+)(?:\.(\d+))?@(\d+)(?:([<>])(\d+))?", text.strip())
        kind = None if match is None or match[1] not in list(Kind) else Kind(match[1])
        if match is None or kind is None or match[5] != _arrow(kind):
            raise PlanError(
                f"{text!r} is no action; write a kind ({', '.join(Kind)}), chunk, .microbatch, @version and, for a "
                f"message, >peer or <peer: F0.2@0, SEND_F0.2@0>1."
            )
        microbatch, peer = (None if digits is None else int(digits) for digits in (match[3], match[6]))
        return cls(kind, int(match[2]), microbatch, int(match[4]), peer)


Schedule = list[Action]


def _arrow(kind: Kind) -> str | None:
    return ">" if kind in SENDS else "<" if kind in RECEIVES else None
