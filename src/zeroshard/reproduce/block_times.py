"""Times of a tensor-parallel GPT on GPUs from shapes and rates: a model, not a rehearsal.

Matrix products take whole waves of tiles on all multiprocessors, everything else takes its bytes. The operations are
those of Megatron-LM with fused kernels (2104.04473, section 4.2) and 16 bits. Letters as in section 3.1: b rows of a
microbatch, s positions, h width, a heads, t ranks that split layers, l layers, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from zeroshard.doctor.hardware import Device, Machines

DTYPE, NBYTES = "fp16", 2
MULTIPROCESSORS = 108  # of an A100
TILES = ((256, 128), (128, 256))  # of a product's result, the largest of the vendor's library
WAVE_RATE = 0.75  # of the peak, in whole waves of tiles: assumed
PEAK = 312e12  # operations per second in 16 bits
NETWORK_GBPS = 8 * 200  # of a DGX A100: eight adapters of 200 Gb/s
UPDATE_BYTES = 28  # that mixed-precision Adam reads and writes per parameter: 2 + 12 read, 12 + 2 written


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A GPT block at work on one microbatch.

    Attributes:
        rows: b of the microbatch.
        positions: s of each row.
        width: h.
        heads: a.
    """

    rows: int
    positions: int
    width: int
    heads: int

    @property
    def elements(self) -> int:
        """b·s·h."""
        return self.rows * self.positions * self.width

    @property
    def scores(self) -> int:
        """a·b·s², the attention scores of all heads."""
        return self.heads * self.rows * self.positions**2


@dataclass(frozen=True, slots=True)
class GPTShape:
    """A GPT of section 5.1."""

    layers: int
    width: int
    heads: int
    positions: int = 2048
    vocabulary: int = 51200

    @property
    def parameters(self) -> float:
        """Equation 2."""
        rows = self.vocabulary + self.positions
        return 12 * self.layers * self.width**2 + 13 * self.layers * self.width + rows * self.width

    def flops(self, batch: int) -> float:
        """Equation 3: operations of the products of one step of so many rows, with recomputation."""
        products = 1 + self.positions / (6 * self.width) + self.vocabulary / (16 * self.layers * self.width)
        return 96 * batch * self.positions * self.layers * self.width**2 * products

    def block(self, rows: int) -> BlockShape:
        """A block at work on a microbatch of so many rows."""
        return BlockShape(rows, self.positions, self.width, self.heads)


@dataclass(frozen=True, slots=True)
class Product:
    """`count` matrix products [m, k] x [k, n] of one kernel."""

    m: float
    k: float
    n: float
    count: float = 1

    def seconds(self, device: Device) -> float:
        """By the roofline model, in whole waves of whole tiles."""
        tiled = min(self._padded(*tile) for tile in TILES)
        moved = NBYTES * self.count * (self.m * self.k + self.k * self.n + self.m * self.n)
        return device.op_seconds(2 * self.k * tiled, moved, DTYPE)

    @property
    def backward(self) -> tuple["Product", "Product"]:
        """The products that make the gradients of both factors."""
        return replace(self, k=self.n, n=self.k), replace(self, m=self.k, k=self.m)

    def _padded(self, tile_m: int, tile_n: int) -> int:
        """Elements of the result, padded to whole waves."""
        tiles = self.count * math.ceil(self.m / tile_m) * math.ceil(self.n / tile_n)
        return math.ceil(tiles / MULTIPROCESSORS) * MULTIPROCESSORS * tile_m * tile_n


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one microbatch, forward and backward."""

    forward: float
    backward: float


def dgx_a100(gpus: int) -> Machines:
    """The paper's machines: nodes of eight A100 of 80 GB, at rates of the planner's preset but for products."""
    machines = Machines.of("A100-80", gpus, between_gbps=NETWORK_GBPS)
    rates = {**machines.device.matrix_flops, DTYPE: WAVE_RATE * PEAK}
    return replace(machines, device=replace(machines.device, matrix_flops=rates))


def block_seconds(machines: Machines, shape: BlockShape, t: int) -> PassSeconds:
    """One block with its sums over t neighbours; the backward does not compute the forward again."""
    device, products = machines.device, list(_products(shape, t))
    forward = sum(product.seconds(device) for product in products)
    backward = sum(half.seconds(device) for product in products for half in product.backward)
    forward += sum(device.op_seconds(0, nbytes) for nbytes in _moved_forward(shape, t))
    backward += sum(device.op_seconds(0, nbytes) for nbytes in _moved_backward(shape, t))
    sums = 2 * all_reduce_seconds(machines, NBYTES * shape.elements, t)
    return PassSeconds(forward + sums, backward + sums)


def logits_seconds(machines: Machines, model: GPTShape, rows: int, t: int) -> PassSeconds:
    """The output layer and its loss, with logits of t parts in fp32."""
    product = Product(rows * model.positions, model.width, model.vocabulary / t)
    logits, device = rows * model.positions * model.vocabulary / t, machines.device
    forward = product.seconds(device) + device.op_seconds(0, (2 + 4 + 4 + 2) * logits)
    backward = sum(half.seconds(device) for half in product.backward) + device.op_seconds(0, (4 + 4) * logits)
    return PassSeconds(forward, backward)


def all_reduce_seconds(machines: Machines, nbytes: float, ranks: int, stride: int = 1) -> float:
    """A sum over `ranks` ranks by rings: it scatters, and gathers."""
    return machines.all_reduce_seconds(nbytes, ranks, stride) if ranks > 1 else 0.0


def message_seconds(machines: Machines, nbytes: float, p: int, t: int, scattered: bool) -> float:
    """A message to the next of p stages, from all ranks at once.

    Args:
        nbytes: b·s·h elements.
        scattered: whether each of t ranks sends its part, and gathers all parts on arrival (section 4.1).
    """
    if p == 1:
        return 0.0
    stride = machines.count // p
    if not scattered or t == 1:
        return machines.wire_seconds("send", nbytes, p, stride)
    return machines.wire_seconds("send", nbytes / t, p, stride) + machines.wire_seconds("gather", nbytes, t)


def update_seconds(machines: Machines, parameters: float) -> float:
    """One update of so many parameters."""
    return machines.device.op_seconds(0, UPDATE_BYTES * parameters)


def _products(shape: BlockShape, t: int) -> Iterator[Product]:
    tokens, h, head = shape.rows * shape.positions, shape.width, shape.width // shape.heads
    heads = shape.rows * shape.heads / t
    yield Product(tokens, h, 3 * h / t)
    yield Product(shape.positions, head, shape.positions, heads)
    yield Product(shape.positions, shape.positions, head, heads)
    yield Product(tokens, h / t, h)
    yield Product(tokens, h, 4 * h / t)
    yield Product(tokens, 4 * h / t, h)


def _moved_forward(shape: BlockShape, t: int) -> list[float]:
    """Bytes read and written by each kernel that is no product."""
    x, inner, scores = shape.elements, 4 * shape.elements / t, shape.scores / t
    norm, dropped, activated = 4 * x, (2 + 2 + 2 + 1) * x, 4 * inner  # dropped: bias + dropout + add, with a mask
    return [norm, 4 * scores, (2 + 2 + 1) * scores, dropped, norm, activated, dropped]


def _moved_backward(shape: BlockShape, t: int) -> list[float]:
    x, inner, scores = shape.elements, 4 * shape.elements / t, shape.scores / t
    norm, dropped, added, activated = 6 * x, (2 + 1 + 2) * x, 6 * x, 6 * inner
    return [norm, 6 * scores, (2 + 1 + 2) * scores, dropped, norm, activated, dropped, added]
