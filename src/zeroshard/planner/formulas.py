"""First numbers of plans by formulas of the model's shape alone, without torch: no plan is refused or chosen by them.

States follow the ZeRO paper (1910.02054, section 3.1), with the units that stage 3 gathers. Activations are those that
autograd keeps of each block; their coefficients were counted in rehearsals of the built-in model and of transformers'
Llama, as were those of the logits. Times are matrix products at the device's rate, and offload's traffic beside them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zeroshard.doctor.hardware import Machines

MARGIN = 0.03  # share of a device's memory that stays free
MASTER = {2: 4, 4: 0}  # bytes of a parameter's master weight, by those of the parameter
MOMENTS = 8  # bytes of Adam's states of a parameter
SUMS = 4  # bytes of an element of the gradients that wait for their reduction
LOGITS = {False: 11.6, True: 7.1}  # bytes of each logit that exists, whole or of a chunk, in 16 bits with fp32 losses
CHUNK = 1024  # rows of a chunk


@dataclass(frozen=True, slots=True)
class ModelBlock:
    """Equal blocks of a model.

    Attributes:
        number: of them.
        parameters: of one.
        used: of them, those that a token uses.
        kept: numbers of 16 bits that autograd keeps of one token.
        attention: width of the queries and of the values of all heads, which each pair of positions multiplies.
        sides: inputs and outputs of all linear layers, beside which adapters lie.
    """

    number: int
    parameters: int
    used: int
    kept: float
    attention: int
    sides: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A language model, as far as the formulas need it.

    Attributes:
        rest: parameters outside of the blocks.
        width: of the residual stream.
        chunks: whether the loss is chunked in any case.
    """

    blocks: tuple[ModelBlock, ...]
    rest: int
    width: int
    vocabulary: int
    chunks: bool

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.rest + sum(block.number * block.parameters for block in self.blocks)

    @property
    def used(self) -> int:
        """Those that a token uses."""
        return self.rest + sum(block.number * block.used for block in self.blocks)

    @property
    def largest(self) -> int:
        """Parameters of the largest block."""
        return max(block.parameters for block in self.blocks)

    def row_flops(self, length: int) -> tuple[int, int]:
        """Model FLOPs of a row's forward and backward (2204.02311, appendix B), with whole and causal attention.

        6 for each token and parameter that multiplies it, norms counted with them and tables of embeddings not; and 6
        for each pair of positions and feature of queries and values, of which half under causal attention.
        """
        multiplied = sum(block.number * block.used for block in self.blocks) + self.vocabulary * self.width
        pairs = length**2 * sum(block.number * block.attention for block in self.blocks)
        products = 6 * length * multiplied
        return products + 6 * pairs, products + 3 * pairs


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """Adapters beside a frozen model.

    Attributes:
        rank: of them.
        width: bytes of a frozen weight in the blocks.
    """

    rank: int
    width: float


@dataclass(frozen=True, slots=True)
class StepSize:
    """A step of one rank.

    Attributes:
        rows: of the rank.
        sequence: tokens of a row.
        width: bytes of a parameter: 2 or 4.
        adapters: that are trained instead of all weights; None without.
    """

    rows: int
    sequence: int
    width: int
    adapters: "AdapterSize | None" = None


@dataclass(frozen=True, slots=True)
class FirstRow:
    """One line of the first table.

    Attributes:
        plan: its description.
        peak: bytes of the fullest device.
        host: bytes of each node's host memory.
        tokens_per_second: of all ranks.
        likely: whether both have room, by these numbers.
    """

    plan: str
    peak: int
    host: int
    tokens_per_second: float
    likely: bool


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where a plan keeps the states, and how often it computes a forward.

    Attributes:
        slices: of the weights, of the gradients and of the optimizer's states on the device: "1" all, "N" one of as
            many slices as ranks, "half" a half, "0" none.
        gathered: copies of the largest block that are gathered, with one of the rest of the model.
        hosted: copies of the weights in host memory; with any, the optimizer's states are there.
        forwards: computed for each backward.
        passes: times that weights or gradients cross the network.
        alone: whether one rank can have it.
    """

    description: str
    slices: tuple[str, str, str]
    gathered: int = 0
    hosted: float = 0
    forwards: int = 1
    passes: int = 2
    alone: bool = False


ARRANGEMENTS = (
    Arrangement("zero 0", ("1", "1", "1"), alone=True),
    Arrangement("zero 1", ("1", "1", "N")),
    Arrangement("zero 2", ("1", "N", "N")),
    Arrangement("zero 3", ("N", "N", "N"), gathered=1, passes=3),
    Arrangement("zero 0, recompute", ("1", "1", "1"), forwards=2, alone=True),
    Arrangement("zero 3, recompute", ("N", "N", "N"), gathered=1, passes=3, forwards=2),
    Arrangement("zero 2, offload optimizer 50%", ("1", "half", "half"), hosted=0.5, alone=True),
    Arrangement("zero 2, offload optimizer 50%, recompute", ("1", "half", "half"), hosted=0.5, forwards=2, alone=True),
    Arrangement("zero 2, offload optimizer", ("1", "0", "0"), hosted=1, alone=True),
    Arrangement("zero 2, offload optimizer, recompute", ("1", "0", "0"), hosted=1, forwards=2, alone=True),
    Arrangement("zero 3, offload optimizer, recompute", ("N", "0", "0"), gathered=1, hosted=1, passes=3, forwards=2),
    Arrangement(
        "zero 3, offload optimizer + parameters, recompute",
        slices=("0", "0", "0"),
        gathered=2,
        hosted=2,
        forwards=2,
        passes=3,
        alone=True,
    ),
)


def first_rows(shape: ModelShape, step: StepSize, machines: Machines) -> list[FirstRow]:
    """The first table, rows that are likely to fit first, the fastest of them first."""
    chosen = [one for one in ARRANGEMENTS if one.alone or machines.count > 1]
    if step.adapters is not None:
        chosen = [one for one in chosen if not one.hosted]
    return sorted((min(_rows(shape, step, machines, one), key=_order) for one in chosen), key=_order)


def _order(row: FirstRow) -> tuple[bool, float]:
    return (not row.likely, -row.tokens_per_second if row.likely else row.peak)


def _rows(shape: ModelShape, step: StepSize, machines: Machines, arranged: Arrangement) -> Iterator[FirstRow]:
    """One for each number of microbatches."""
    room = machines.device.capacity_bytes * (1 - MARGIN)
    tokens = step.rows * step.sequence * machines.count
    speed = tokens / _seconds(shape, step, machines, arranged)
    for count in (m for m in range(1, step.rows + 1) if step.rows % m == 0):
        peak = int(device_bytes(shape, step, machines.count, arranged, count))
        kept = int(_host_bytes(shape, step, machines, arranged, count > 1))
        likely = peak <= room and machines.node_holds(kept)
        many = f", {count} microbatches" if count > 1 else ""
        rows = f"{step.rows} row{'s' * (step.rows > 1)}"
        yield FirstRow(f"{arranged.description}{many}, {rows}", peak, kept, speed, likely)


def device_bytes(shape: ModelShape, step: StepSize, ranks: int, arranged: Arrangement, microbatches: int) -> float:
    """Bytes at the peak of a rank: states, activations of one microbatch, the logits, and gradients on their way."""
    shares = {"1": 1.0, "N": 1 / ranks, "half": 0.5, "0": 0.0}
    trained = _trained(shape, step)
    weights, gradients, updated = (shares[each] * trained for each in arranged.slices)
    states = step.width * (weights + gradients) + (MASTER[step.width] + MOMENTS) * updated
    if step.adapters is not None:
        frozen = step.adapters.width * (shape.parameters - shape.rest) + step.width * shape.rest
        largest = step.adapters.width * shape.largest + step.width * shape.rest
        frozen = shares[arranged.slices[0]] * frozen + largest * min(arranged.gathered, 1)
        return states + frozen + _activations(shape, step, arranged, microbatches)
    gathered = step.width * (arranged.gathered * shape.largest + min(arranged.gathered, 1) * shape.rest)
    waiting = SUMS * max(shape.rest, shape.largest + min(shape.rest, shape.largest))
    return states + gathered + waiting + _activations(shape, step, arranged, microbatches)


def _trained(shape: ModelShape, step: StepSize) -> int:
    """Trained parameters: all, or those of adapters."""
    if step.adapters is None:
        return shape.parameters
    return step.adapters.rank * sum(block.number * block.sides for block in shape.blocks)


def _activations(shape: ModelShape, step: StepSize, arranged: Arrangement, microbatches: int) -> float:
    tokens = step.rows * step.sequence / microbatches
    one = max(block.kept * step.width for block in shape.blocks)
    inputs = sum(block.number for block in shape.blocks) * shape.width * step.width
    whole = {1: sum(block.number * block.kept * step.width for block in shape.blocks), 2: inputs + one}
    chunked = shape.chunks or arranged.forwards > 1
    logits = shape.vocabulary * LOGITS[chunked] * (min(tokens, CHUNK) if chunked else tokens)
    kept = tokens * whole[arranged.forwards]
    return max(kept, kept - tokens * one * (arranged.forwards - 1) + logits)


def _host_bytes(shape: ModelShape, step: StepSize, machines: Machines, arranged: Arrangement, adds: bool) -> float:
    """Master weights, moments, gradients until their update, and the weights that come and go."""
    each = MASTER[step.width] or step.width
    new_weights = step.width * (arranged.hosted <= 1 and step.width == 2)  # those in 16 bits leave fp32 sums no room
    added = (SUMS + new_weights) * adds
    kept = (each + MOMENTS + added) * min(arranged.hosted, 1) + step.width * arranged.hosted
    return kept * shape.parameters / machines.count * min(machines.count, machines.per_node)


def _seconds(shape: ModelShape, step: StepSize, machines: Machines, arranged: Arrangement) -> float:
    """Of one step: computation beside traffic, and updates in host memory after both."""
    rates = machines.device.matrix_flops
    backwards = 2 if step.adapters is None else 1  # frozen weights have no gradients
    flops = 2 * (backwards + arranged.forwards) * shape.used * step.rows * step.sequence
    compute = flops / rates.get({2: "bf16", 4: "fp32"}[step.width], rates["fp32"])
    sent = shape.parameters if arranged.gathered else _trained(shape, step)
    nbytes, own = step.width * sent, shape.parameters / machines.count
    wire = arranged.passes * machines.wire_seconds("gather", nbytes, machines.count)
    copies = max(arranged.hosted, 2 * arranged.hosted - 1) * machines.copy_seconds(step.width * own)
    update = min(arranged.hosted, 1) * machines.update_seconds((4 + MOMENTS) * own)
    return max(compute, wire, copies) + update
