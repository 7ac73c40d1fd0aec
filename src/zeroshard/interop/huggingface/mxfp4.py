"""Weights of experts in MXFP4 (OCP Microscaling Formats v1.0, section 5.3), as GPT-OSS's files hold them.

    X_blocks (U8) [E, O, G, 16]   two E2M1 values per byte, the lower half first; 32 values make a block
    X_scales (U8) [E, O, G]       one E8M0 exponent per block: a factor of 2^(scale - 127)

X is [E, 32 G, O]: the files hold the transposed matrices. A box of X is read from the bytes of its blocks, some rows at
a time. Every value is one of bf16 but at the ends of its range.
"""

from collections.abc import Iterator, Mapping

import torch

from zeroshard.checkpoint.boxes import Box, BoxValues
from zeroshard.checkpoint.weights import Shards
from zeroshard.errors import CheckpointError
from zeroshard.interop.huggingface.lazy import LazyTensor

BLOCKS, SCALES = "_blocks", "_scales"  # ends of names
HALF, BIAS = 16, 127  # bytes of a block, and the scale of a factor of 1
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1; the fourth bit is the sign
BAND = 2**18  # elements that are made at a time


class MicroscaledTensor(LazyTensor):
    """A stack of matrices in MXFP4, multiplied out in bf16.

    Args:
        shards: the files.
        name: of the tensor, without the ends of its blocks and scales.

    Raises:
        CheckpointError: the shapes of blocks and scales do not fit together.
    """

    def __init__(self, shards: Shards, name: str) -> None:
        blocks, scales = shards.shapes[name + BLOCKS], shards.shapes[name + SCALES]
        if len(blocks) != 4 or blocks[-1] != HALF or blocks[:-1] != scales:
            raise CheckpointError(
                f"{shards.file_of(name + BLOCKS)} holds '{name}{BLOCKS}' as {list(blocks)} and '{name}{SCALES}' as "
                f"{list(scales)}, and MXFP4 has 16 bytes for each scale: [E, O, G, 16] and [E, O, G]. Copy the files "
                f"again."
            )
        experts, rows, groups, _ = blocks
        super().__init__((experts, groups * 2 * HALF, rows), torch.bfloat16)
        self._shards, self._name = shards, name
        self._values = torch.tensor([sign * value for sign in (1.0, -1.0) for value in MAGNITUDES])

    def fill(self, box: Box, values: torch.Tensor) -> None:
        """Read the blocks that overlap the box, one expert after the other."""
        (first, low, start), (experts, features, rows) = box.start, box.shape
        if not box.numel:
            return
        group, last = low // (2 * HALF), -(-(low + features) // (2 * HALF))
        band = max(1, BAND // ((last - group) * 2 * HALF))
        for expert in range(experts):
            for row in range(0, rows, band):
                count = min(band, rows - row)
                there = Box((first + expert, start + row, group), (1, count, last - group))
                inside = self._read(there)[:, low - group * 2 * HALF :][:, :features]
                values[expert, :, row : row + count].copy_(inside.T)

    def stored(self) -> Iterator[str]:
        """The names of blocks and scales."""
        yield from (self._name + BLOCKS, self._name + SCALES)

    def _read(self, box: Box) -> torch.Tensor:
        """Rows [R, 32 g] of one expert, in fp32.

        Args:
            box: of the scales: [1, R, g].
        """
        scales = torch.empty(box.shape, dtype=torch.uint8)
        codes = torch.empty((*box.shape, HALF), dtype=torch.uint8)
        self._shards.fill(self._name + SCALES, [BoxValues(box, scales)])
        self._shards.fill(self._name + BLOCKS, [BoxValues(Box((*box.start, 0), (*box.shape, HALF)), codes)])
        both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        factors = torch.ldexp(torch.ones(()), scales.int() - BIAS)
        return (self._values[both.int()] * factors.unsqueeze(-1)).view(box.shape[1], -1)


def with_microscaled(stored: Mapping[str, LazyTensor], shards: Shards) -> dict[str, LazyTensor]:
    """The tensors of files with the weights that pairs of blocks and scales stand for in their place.

    Raises:
        CheckpointError: as `MicroscaledTensor`.
    """
    names = [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]
    pairs = [n for n in names if n + SCALES in stored and {shards.code(n + e) for e in (BLOCKS, SCALES)} == {"U8"}]
    ends = {name + end for name in pairs for end in (BLOCKS, SCALES)}
    kept = {name: tensor for name, tensor in stored.items() if name not in ends}
    return kept | {name: MicroscaledTensor(shards, name) for name in pairs}
