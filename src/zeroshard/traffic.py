"""Traffic over the wire and between tiers, by purpose. Counts follow the ZeRO paper (1910.02054, section 7)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Purpose(StrEnum):
    """The purpose of a collective, or of a copy between tiers (down: to the host; up: to the device)."""

    GATHER_PARAMETERS = "gather parameters"
    GATHER_TO_EVALUATE = "gather to evaluate"
    REDUCE_GRADIENTS = "reduce gradients"
    GATHER_GRADIENTS = "gather gradients"
    AVERAGE_REPLICAS = "average replicas"
    JOIN_MATRICES = "join matrices"
    ASK_FOR_ROWS = "ask for rows"
    SEND_ACTIVATIONS = "send activations"
    SEND_TO_EVALUATE = "send to evaluate"
    SEND_GRADIENTS = "send their gradients"
    GATHER_MESSAGES = "gather messages"
    LEND_WEIGHTS = "lend weights"
    REPAY_GRADIENTS = "repay their gradients"
    SUM_ACTIVATIONS = "sum activations"
    GATHER_ACTIVATIONS = "gather activations"
    GATHER_CHECKPOINTS = "gather checkpoints"
    SUM_LOSSES = "sum losses"
    SUM_TO_EVALUATE = "sum to evaluate"
    COUNT_TOKENS = "count tokens"
    EXCHANGE_TOKENS = "exchange tokens"
    GRADIENTS_DOWN = "gradients down"
    PARAMETERS_UP = "parameters up"
    PARAMETERS_UP_TO_EVALUATE = "parameters up to evaluate"
    ACTIVATIONS_DOWN = "activations down"
    ACTIVATIONS_UP = "activations up"
    CONTROL = "agreement"
    SETUP = "set-up"


BETWEEN_TIERS = (
    *(Purpose.GRADIENTS_DOWN, Purpose.PARAMETERS_UP, Purpose.PARAMETERS_UP_TO_EVALUATE),
    *(Purpose.ACTIVATIONS_DOWN, Purpose.ACTIVATIONS_UP),
)
TO_EVALUATE = {  # purposes of collectives inside of layers in an evaluation
    Purpose.SUM_ACTIVATIONS: Purpose.SUM_TO_EVALUATE,
    Purpose.SUM_LOSSES: Purpose.SUM_TO_EVALUATE,
    Purpose.GATHER_ACTIVATIONS: Purpose.GATHER_TO_EVALUATE,
    Purpose.COUNT_TOKENS: Purpose.GATHER_TO_EVALUATE,
    Purpose.EXCHANGE_TOKENS: Purpose.SEND_TO_EVALUATE,
}
UPDATE, DISK, COMPUTE = "update", "disk", "compute"
QUEUES = {  # tasks of one queue run one after the other
    Purpose.GRADIENTS_DOWN: "down",
    Purpose.ACTIVATIONS_DOWN: "down",
    Purpose.PARAMETERS_UP: "up",
    Purpose.PARAMETERS_UP_TO_EVALUATE: "up",
    Purpose.ACTIVATIONS_UP: "up",
    UPDATE: "host",
    DISK: "disk",
}
LOANS = (Purpose.LEND_WEIGHTS, Purpose.REPAY_GRADIENTS)
BACKWARDS = (Purpose.SEND_GRADIENTS, Purpose.REPAY_GRADIENTS)  # sent in another group than those of forwards


@dataclass(slots=True)
class Count:
    """Traffic for one purpose.

    Attributes:
        elements: elements moved, by the paper's count, without padding.
        padding: padding elements moved with them.
        nbytes: bytes of both.
        sent_nbytes: bytes that this rank itself sent.
        calls: number of collectives.
        seconds: time that this rank waited.
        planned: elements by a formula that is entered in the step; None where there is none.
    """

    elements: int = 0
    padding: int = 0
    nbytes: int = 0
    sent_nbytes: int = 0
    calls: int = 0
    seconds: float = 0.0
    planned: int | None = None

    def add(self, other: "Count") -> None:
        """Add the traffic of another count."""
        self.elements += other.elements
        self.padding += other.padding
        self.nbytes += other.nbytes
        self.sent_nbytes += other.sent_nbytes
        self.calls += other.calls
        self.seconds += other.seconds
        if other.planned is not None:
            self.planned = (self.planned or 0) + other.planned


def merged(counts: Iterable[Mapping[Purpose, Count]]) -> dict[Purpose, Count]:
    """The sums of several `Comm.counts`."""
    total: dict[Purpose, Count] = {}
    for each in counts:
        for purpose, count in each.items():
            total.setdefault(purpose, Count()).add(count)
    return total


def seconds_waited(counts: Iterable[Mapping[Purpose, Count]]) -> float:
    """Seconds for which a rank waited for others, in several `Comm.counts`."""
    every = (item for each in counts for item in each.items())
    return sum(count.seconds for purpose, count in every if purpose not in BETWEEN_TIERS)
