"""8-bit weights with scales, in files, as the weights that they stand for.

    X.weight (F8_E4M3) with X.weight_scale_inv       one factor per block, of 128 x 128 in DeepSeek-V3's files
    X.weight (F8_E4M3 or I8) with X.weight_scale     one factor per tensor, per row or per block

Both names hold factors that multiply the weights. Products are made in fp32, some rows at a time. The second kind is
that of compressed-tensors, too. Files of other methods are refused by the method's name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.checkpoint.boxes import Box, BoxValues
from zeroshard.checkpoint.weights import Shards
from zeroshard.errors import CheckpointError, ModelError

READ = ("fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes")  # methods whose weights are read
COMPRESSED = "compressed-tensors"
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "dense")  # of compressed-tensors, that are read
BY_TRANSFORMERS: Mapping[str, str] = {  # how transformers makes floating-point weights of those that are not read
    COMPRESSED: "from_pretrained(..., quantization_config=CompressedTensorsConfig(dequantize=True))",
    "higgs": "from_pretrained(...).dequantize()",
}
SCALES = ("_scale_inv", "_scale")
BESIDE = ("input_scale", "activation_scale", "k_scale", "v_scale")  # of activations, of which training has no use
POINTS = ("weight_zero_point", "input_zero_point", "output_zero_point", "output_scale")
BLOCK = 128  # rows and columns, unless the configuration says otherwise
BAND = 2**18  # elements that are multiplied at a time


class ScaledShards:
    """The tensors of safetensors files, with scaled 8-bit weights multiplied out.

    Args:
        quantisation: the configuration's `quantization_config`.

    Attributes:
        shapes: by name; without scales.

    Raises:
        CheckpointError: the scales of a weight do not fit its shape.
    """

    def __init__(self, shards: Shards, quantisation: Mapping[str, Any]) -> None:
        self._shards = shards
        self._block = tuple(quantisation.get("weight_block_size") or (BLOCK, BLOCK))
        self._scales: dict[str, str] = {}
        for name in shards.shapes:
            beside = (name + end for end in SCALES if name + end in shards.shapes)
            scale = next(beside, None)
            if scale is not None and (shards.code(name) == "I8" or shards.code(name).startswith("F8")):
                self._refuse_points(name)
                self._scales[name] = scale
        ends = (*BESIDE, *POINTS) if self._scales else BESIDE
        left_out = {*self._scales.values(), *(name for name in shards.shapes if name.endswith(ends))}
        self.shapes = {name: shape for name, shape in shards.shapes.items() if name not in left_out}
        for name in self._scales:
            self._blocks(name)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor as it is read: fp32 for a scaled one."""
        return torch.float32 if name in self._scales else self._shards.dtype(name)

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor."""
        if name not in self._scales:
            self._shards.fill(name, targets)
            return
        scale = self._shards.whole(self._scales[name]).view(self._shards.shapes[self._scales[name]]).float()
        for box, values in targets:
            self._fill(name, scale, box, values)

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, flat."""
        if name not in self._scales:
            return self._shards.whole(name)
        values = torch.empty(self.shapes[name])
        self.fill(name, [BoxValues(Box.whole(self.shapes[name]), values)])
        return values.view(-1)

    def _fill(self, name: str, scale: torch.Tensor, box: Box, values: torch.Tensor) -> None:
        blocks = self._blocks(name)
        scale = scale.reshape([*scale.shape, *(1,) * (len(blocks) - scale.dim())] if scale.numel() > 1 else ())
        rows = max(1, BAND // max(1, box.numel // max(1, box.shape[0])))
        for first in range(0, box.shape[0], rows):
            count = min(rows, box.shape[0] - first)
            band = Box((box.start[0] + first, *box.start[1:]), (count, *box.shape[1:]))
            codes = torch.empty(band.shape, dtype=self._shards.dtype(name))
            self._shards.fill(name, [BoxValues(band, codes)])
            products = codes.float()
            factors = scale
            for dim, block in enumerate(blocks if scale.dim() else ()):
                places = torch.arange(band.start[dim], band.start[dim] + band.shape[dim]) // block
                factors = factors.index_select(dim, places)
            values[first : first + count].copy_(products.mul_(factors))

    def _refuse_points(self, name: str) -> None:
        """Refuse codes whose zero is not 0.

        Raises:
            CheckpointError: with the tensor.
        """
        points = f"{name}_zero_point"
        if points in self._shards.shapes and self._shards.whole(points).any():
            raise CheckpointError(
                f"{self._shards.file_of(name)} holds '{name}' in codes whose zeros are in '{points}', and codes are "
                f"read where these are 0. Give weights that are not quantized."
            )

    def _blocks(self, name: str) -> tuple[int, ...]:
        """The elements under one factor along each dimension."""
        shape, scale = self._shards.shapes[name], self._shards.shapes[self._scales[name]]
        scale = (*scale, *(1,) * (len(shape) - len(scale)))
        sizes = (*(1,) * (len(shape) - len(self._block)), *self._block)
        blocks = []
        for length, factors, size in zip(shape, scale, sizes, strict=False):
            fits = {1: length, length: 1}.get(factors, size if -(-length // size) == factors else 0)
            blocks.append(fits)
        if len(scale) != len(shape) or (shape and not all(blocks)):
            raise CheckpointError(
                f"{self._shards.file_of(name)} holds '{name}' as {list(shape)} and '{self._scales[name]}' as "
                f"{list(scale)}, which is neither one factor, one per row, nor one per block of {self._block}. Set "
                f'"weight_block_size" in the configuration, or give weights that are not quantized.'
            )
        return tuple(blocks)


def quantisation_of(config: Any) -> Mapping[str, Any]:
    """The settings of quantised weights in a model's configuration; empty if there are none.

    Raises:
        ModelError: of a method or a format that is not read.
    """
    found = getattr(config, "quantization_config", None)
    table: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict() if found is not None else {}
    method = str(getattr(table.get("quant_method", "fp8"), "value", table.get("quant_method", "fp8")))
    form = str(table.get("format", "dense"))
    if method in READ or (method == COMPRESSED and form in FORMATS):
        return table
    named = f"{method} ({form})" if method == COMPRESSED else method
    way = BY_TRANSFORMERS.get(method)
    if way is None:
        way = (
            "the floating-point weights from which they were made, which the model's card names; quantized='nf4' "
            "quantises those while they are read"
        )
    else:
        way = f"the folder that transformers writes of them: {way}, then save_pretrained(folder)"
    read = ", ".join((*READ, f"{COMPRESSED} in 8 bits"))
    raise ModelError(f"The weights are quantised by {named}, which is not read; {read} are. Give {way}.")
