"""Stacked weights of experts [E, O, I], each matrix quantised by itself.

Packages quantise linear layers, and experts of recent models are none: their weights are stacked, and their forwards
take one expert's matrix at a time (`linear(rows, self.gate_up_proj[expert])`). Here the attribute is a stack of
quantised matrices instead, over parameters of codes and statistics with one row per expert, so that the module's own
forward runs with the kernels of bitsandbytes, whose backward keeps codes alone; experts are divided among ranks by
their first dimension as before.

Shapes: E experts, O and I features, c bytes of codes, b blocks of a matrix, s of its scales.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.quantized.weights import NESTED_BLOCK, STACK, Parameters, Row, mark, row_of, table

CODES = "codes"  # the end of the name of a stack's codes


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """The way in which each matrix of a stack is quantised.

    Attributes:
        quant_type: "nf4" or "fp4"; "int8" for 8 bits.
        blocksize: elements under one scale, of 4-bit codes.
        double: whether the scales are quantised, too.
        shape: (O, I).
        dtype: of the matrix before it was quantised.
    """

    quant_type: str
    blocksize: int
    double: bool
    shape: torch.Size
    dtype: torch.dtype

    def quantised(self, matrix: Tensor) -> dict[str, Tensor]:
        """Codes and statistics of a matrix [O, I], by the ends of their names."""
        functional = _bitsandbytes().functional
        if self.quant_type == "int8":
            codes, scales, _ = functional.int8_vectorwise_quant(matrix.to(torch.float16))
            return {CODES: codes, "SCB": scales}
        codes, state = functional.quantize_4bit(
            matrix.contiguous(), blocksize=self.blocksize, compress_statistics=self.double, quant_type=self.quant_type
        )
        found = {CODES: codes.view(-1), "absmax": state.absmax}
        if self.double:
            found |= {"nested_absmax": state.state2.absmax, "offset": state.offset.view(1)}
        return found

    def product(self, rows: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """Rows [R, I] times the transposed matrix: [R, O], by the kernel of the package."""
        bitsandbytes = _bitsandbytes()
        if self.quant_type == "int8":
            state = bitsandbytes.MatmulLtState(CB=tensors[CODES], SCB=tensors["SCB"])
            state.has_fp16_weights = False
            product: Tensor = bitsandbytes.matmul(rows, tensors[CODES], state=state, bias=bias)
            return product
        product = bitsandbytes.matmul_4bit(rows, tensors[CODES].view(-1, 1), quant_state=self.state(tensors), bias=bias)
        return product

    def state(self, tensors: Mapping[str, Tensor]) -> Any:
        """The package's object of the statistics of one matrix with 4-bit codes."""
        functional = _bitsandbytes().functional
        device, nested = tensors["absmax"].device, None
        if self.double:
            code = _values_of_codes("dynamic", device)
            nested = functional.QuantState(
                tensors["nested_absmax"], code=code, blocksize=NESTED_BLOCK, dtype=torch.float32
            )
        return functional.QuantState(
            tensors["absmax"],
            shape=self.shape,
            code=_values_of_codes(self.quant_type, device),
            blocksize=self.blocksize,
            quant_type=self.quant_type,
            dtype=self.dtype,
            offset=tensors["offset"].view(()) if self.double else None,
            state2=nested,
        )

    def whole(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The matrix [O, I] that codes and statistics stand for."""
        functional = _bitsandbytes().functional
        if self.quant_type == "int8":
            values: Tensor = functional.int8_vectorwise_dequant(tensors[CODES], tensors["SCB"])
            return values.to(self.dtype)
        values = functional.dequantize_4bit(tensors[CODES].view(-1, 1), self.state(tensors))
        return values


@cache
def _values_of_codes(kind: str, device: torch.device) -> Tensor:
    """The values that codes stand for: of "nf4" and "fp4" [16], of scales that are quantised, too, "dynamic" [256]."""
    functional = _bitsandbytes().functional
    values = functional.create_dynamic_map() if kind == "dynamic" else functional.get_4bit_type(kind, device="cpu")
    return table(values, device)


def _bitsandbytes() -> Any:
    return importlib.import_module("bitsandbytes")


class QuantizedMatrix:
    """One matrix of a stack, which `torch.nn.functional.linear` multiplies with rows.

    Attributes:
        shape: (O, I).
    """

    def __init__(self, kind: MatrixFormat, tensors: Mapping[str, Tensor]) -> None:
        self._kind, self._tensors, self.shape = kind, tensors, kind.shape

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Compute a linear layer.

        Raises:
            TypeError: another function is called.
        """
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs or {})
        if function is not nn.functional.linear or not isinstance(given["weight"], QuantizedMatrix):
            raise TypeError(
                f"{getattr(function, '__name__', function)} is called with a quantised matrix of experts, which takes "
                f"part in torch.nn.functional.linear alone. Leave the module of experts out of quantisation."
            )
        matrix = given["weight"]
        product: Tensor = matrix._kind.product(given["input"], matrix._tensors, given.get("bias"))
        return product


class QuantizedStack:
    """The matrices of a module of experts, by expert; `stack[e]` is a `QuantizedMatrix`.

    Attributes:
        kind: the way in which each matrix is quantised.
        parameters: codes [E, c] and statistics [E, ...], by the ends of their names.
    """

    def __init__(self, kind: MatrixFormat, parameters: Parameters) -> None:
        self.kind, self.parameters = kind, parameters

    def __getitem__(self, expert: int | Tensor) -> QuantizedMatrix:
        rows = {end: parameter[int(expert)] for end, parameter in self.parameters.items()}
        return QuantizedMatrix(self.kind, rows)

    @property
    def shape(self) -> torch.Size:
        """(E, O, I), of the experts that the parameters hold."""
        return torch.Size([len(self.parameters[CODES]), *self.kind.shape])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices before they were quantised."""
        return self.kind.dtype


class Stacked:
    """The format of stacks, each a plain attribute of its module.

    Attributes:
        label: in messages.
    """

    label = "stack of quantised matrices"

    def fits(self, parameter: nn.Parameter) -> bool:
        """False: stacks are made, not found."""
        return False

    def statistics(self, module: nn.Module, parameter: nn.Parameter) -> dict[str, Tensor] | None:
        """None: the tensors of a stack are parameters from the beginning."""

    def join(self, module: nn.Module, name: str, tensors: Parameters) -> None:
        """Put the parameters into the stack."""
        stack: QuantizedStack = vars(module)[name]
        stack.parameters = tensors

    def described(self, module: nn.Module, name: str) -> tuple[torch.Size, torch.dtype]:
        """Those of the stack [E, O, I] of this rank."""
        stack: QuantizedStack = vars(module)[name]
        return stack.shape, stack.dtype

    def dequantised(self, module: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Matrix by matrix."""
        stack: QuantizedStack = vars(module)[name]
        count = len(tensors[CODES])
        return torch.stack(
            [stack.kind.whole({end: rows[number] for end, rows in tensors.items()}) for number in range(count)]
        )

    def row(self, module: nn.Module, name: str) -> Row | None:
        """Of each matrix."""
        kind = vars(module)[name].kind
        shape = None if kind.quant_type == "int8" else list(kind.shape)
        return row_of(kind.quant_type, kind.blocksize, kind.double, shape, kind.dtype, STACK)


def stacks_of(model: nn.Module) -> dict[str, QuantizedStack]:
    """The quantised stacks of a model, by the names of the weights whose place they take."""
    return {
        f"{path}.{name}".lstrip("."): stack
        for path, module in model.named_modules()
        for name, stack in vars(module).items()
        if isinstance(stack, QuantizedStack)
    }


def stack_on_meta(module: nn.Module, name: str, kind: MatrixFormat) -> None:
    """Replace stacked weights [E, O, I] on the meta device by a quantised stack on it."""
    weight = module._parameters.pop(name)
    assert weight is not None
    probe = kind.quantised(torch.zeros(kind.shape, dtype=kind.dtype))
    tensors = {}
    for end, values in probe.items():
        empty = torch.empty(len(weight), *values.shape, dtype=values.dtype, device="meta")
        tensors[end] = nn.Parameter(empty, requires_grad=False)
        module.register_parameter(f"{name}_{end}", tensors[end])
    vars(module)[name] = QuantizedStack(kind, tensors)
    mark(module, name, Stacked(), tuple(tensors))


def quantised_rows(kind: MatrixFormat, count: int, matrix: Callable[[int], Tensor]) -> dict[str, Tensor]:
    """Codes and statistics of `count` matrices, one after the other: [count, ...] by the ends of their names."""
    rows = [kind.quantised(matrix(number)) for number in range(count)]
    return {end: torch.stack([row[end] for row in rows]) for end in rows[0]}
