"""Copies that convolutions make on CPUs: against all that torch allocates, one operation and a whole network."""

from functools import partial
from typing import Any

import pytest
import torch
from planner.rehearsed import peak_of
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zeroshard as zs
from zeroshard.doctor.hardware import Device, Link, Machines
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.workspaces import beside_results

CPU = Machines(Device("some CPU", "cpu", 2**36, {"fp32": 5e10}, 1e10, 5e-6), 1, 1, Link(1e9), Link(1e9))
SIDE, CLASSES = 32, 10


class Block(nn.Module):
    """Two convolutions around which the input goes (1512.03385, figure 2)."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out))
        self.second = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.around = nn.Sequential()
        if stride != 1 or into != out:
            self.around = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.around(x))


class ResNet(nn.Module):
    """A small one, with its loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        stem = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.stem = nn.Sequential(*stem)
        shapes = ((width, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1))
        self.blocks = nn.Sequential(*(Block(*shape) for shape in shapes))
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = nn.functional.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1).flatten(1)
        return nn.functional.cross_entropy(self.head(features), labels)


def images(rows: int, side: int = SIDE) -> dict[str, Tensor]:
    return {"images": torch.zeros(rows, 3, side, side), "labels": torch.zeros(rows, dtype=torch.long)}


@pytest.mark.parametrize("rows, side", [(4, 64), (16, 32)])
def test_a_residual_network_within_a_percent(rows: int, side: int) -> None:
    make, plan = partial(torch.optim.SGD, lr=0.1), zs.Plan(zero=0)
    predicted = predict(TrainingTask(ResNet, partial(images, side=side), make, rows), plan, CPU, rows)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        engine = zs.Engine(ResNet(), make, plan, mesh=zs.Mesh())
        batch = images(rows, side)
        for _ in range(3):
            engine.train_step(batch)
    assert predicted.peak_bytes == pytest.approx(peak_of(watched), rel=0.01)


@pytest.mark.parametrize(
    "into, out, kernel, stride, rows",
    [(3, 16, 3, 1, 4), (16, 32, 3, 1, 4), (20, 36, 3, 1, 4), (64, 128, 3, 2, 8), (32, 64, 1, 1, 16), (32, 64, 1, 1, 2)],
)
def test_a_convolution_is_as_high_as_torch_says(into: int, out: int, kernel: int, stride: int, rows: int) -> None:
    x, weight = torch.zeros(rows, into, 16, 16), torch.zeros(out, into, kernel, kernel)
    how: tuple[Any, ...] = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    convolution, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    made = convolution(x, weight, None, *how)
    calls: list[tuple[Any, tuple[Any, ...]]] = [(convolution, (x, weight, None, *how))]
    for to_x in (True, False):
        calls.append((backward, (torch.zeros_like(made), x, weight, None, *how, [to_x, True, False])))
    for func, args in calls:
        rises_to_what_torch_allocates(func, args, rel=0.05)


@pytest.mark.parametrize("images_last, kernel_last", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("into, out, kernel, stride", [(64, 128, 3, 1), (72, 120, 3, 2), (32, 128, 5, 1)])
def test_a_convolution_with_channels_last(
    into: int, out: int, kernel: int, stride: int, images_last: bool, kernel_last: bool
) -> None:
    """All operands are copied to the layout that one of them has; oneDNN's scratch is not counted."""
    x, weight = torch.zeros(4, into, 16, 16), torch.zeros(out, into, kernel, kernel)
    x = x.contiguous(memory_format=torch.channels_last) if images_last else x
    weight = weight.contiguous(memory_format=torch.channels_last) if kernel_last else weight
    how: tuple[Any, ...] = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    convolution, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    made = convolution(x, weight, None, *how)
    calls: list[tuple[Any, tuple[Any, ...]]] = [(convolution, (x, weight, None, *how))]
    for gradient in (torch.zeros(made.shape), torch.zeros_like(made)):
        for needed in ([True, True, True], [False, True, False], [True, False, False])[: 3 if stride == 1 else 2]:
            calls.append((backward, (gradient, x, weight, [out], *how, needed)))
    for func, args in calls:
        rises_to_what_torch_allocates(func, args, rel=0.08)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "into, out, kernel, step, groups", [(4, 4, (33, 1), 1, 4), (4, 8, (3, 3), 1, 2), (3, 16, (8, 8), 8, 1)]
)
def test_convolutions_of_16_bit_numbers(
    into: int, out: int, kernel: tuple[int, int], step: int, groups: int, transposed: bool
) -> None:
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN computes these here")
    x = torch.ones(8, into, 64, 64, dtype=torch.bfloat16)
    x = x.transpose(2, 3) if transposed else x
    weight = torch.ones(out, into // groups, *kernel, dtype=torch.bfloat16)
    how: tuple[Any, ...] = ([step] * 2, [n // 2 if step == 1 else 0 for n in kernel], [1, 1], False, [0, 0], groups)
    convolution, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    made = convolution(x, weight, None, *how)
    rises_to_what_torch_allocates(convolution, (x, weight, None, *how), rel=1e-3)
    for bias in (True, False):
        args = torch.ones_like(made), x, weight, [out] if bias else None, *how, [True, True, bias]
        rises_to_what_torch_allocates(backward, args, rel=1e-3)


ROWS, WIDTH = 64, 256
aten = torch.ops.aten


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape or (ROWS, WIDTH), dtype=dtype)


BF16, FP32, LONG, INT, BOOL = torch.bfloat16, torch.float32, torch.long, torch.int32, torch.bool
MIXED: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mul.Tensor, (of(BF16), of(FP32))),
    (aten.mul.Tensor, (of(BF16), of(FP32, ROWS, 1))),
    (aten.mul.Tensor, (of(FP32), of(BF16, ROWS, 1))),
    (aten.mul.Tensor, (of(BF16), torch.ones(()))),
    (aten.mul.Tensor, (of(BF16), of(BF16))),
    (aten.add.Tensor, (of(LONG), 1.5)),
    (aten.add_.Tensor, (of(BF16), of(FP32))),
    (aten.add_.Tensor, (of(FP32), of(BF16))),
    (aten.where.self, (of(BOOL), of(BF16), of(FP32))),
    (aten.where.self, (of(BOOL), of(BF16), of(BF16))),
    (aten.eq.Tensor, (of(LONG), of(INT))),
    (aten.gt.Scalar, (of(BF16), 0.5)),
    (aten.addcmul_.default, (of(FP32), of(BF16), of(BF16))),
    (aten.pow.Tensor_Tensor, (of(BF16), of(FP32))),
    (aten.sum.dim_IntList, (of(BOOL), [-1])),
    (aten.cumsum.default, (of(BOOL), 1)),
    (aten.sum.dim_IntList, (of(BF16), [-1])),
]


@pytest.mark.parametrize("func, args", MIXED, ids=lambda value: str(value) if not isinstance(value, tuple) else "")
def test_operands_in_another_dtype_are_copied(func: Any, args: tuple[Any, ...]) -> None:
    rises_to_what_torch_allocates(func, args, rel=5e-3)


FEW, ALONG = torch.zeros(ROWS, 8, dtype=LONG), torch.arange(ROWS)[:, None].expand(ROWS, WIDTH)
WRITES: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.gather.default, (1, FEW)),
    (aten.gather.default, (0, ALONG)),
    (aten.scatter.src, (1, FEW, of(BF16))),
    (aten.scatter_.src, (1, FEW, of(BF16))),
    (aten.scatter_.src, (1, FEW[:0], of(BF16))),
    (aten.scatter.value, (1, FEW, 1.0)),
    (aten.scatter_add_.default, (1, FEW, of(BF16))),
    (aten.scatter_add_.default, (0, FEW, of(BF16))),
    (aten.scatter_add_.default, (0, ALONG, of(BF16))),
    (aten.scatter_add.default, (0, ALONG, of(BF16))),
    (aten.scatter_reduce.two, (1, FEW, of(BF16), "amax")),
    (aten.index_add_.default, (0, torch.arange(ROWS), of(BF16))),
    (aten.index_add_.default, (1, torch.arange(WIDTH), of(BF16))),
    (aten.index_add.default, (0, torch.arange(ROWS), of(BF16))),
]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("func, args", WRITES, ids=lambda value: str(value) if not isinstance(value, tuple) else "")
def test_scatters_of_16_bit_numbers_have_a_copy(func: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    args = (of(dtype), *(one.to(dtype) if isinstance(one, Tensor) and one.dtype is BF16 else one for one in args))
    rises_to_what_torch_allocates(func, args, rel=5e-3)


TURNED = of(FP32, 8, 20, WIDTH).transpose(0, 1)
OTHERS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten._softmax.default, (TURNED, 2, False)),
    (aten._softmax.default, (of(FP32), 1, False)),
    (aten._log_softmax.default, (TURNED, 0, False)),
    (aten._log_softmax_backward_data.default, (TURNED, of(FP32, 20, 8, WIDTH), 2, FP32)),
    (aten._softmax_backward_data.default, (TURNED, TURNED, 2, FP32)),
    (aten.cat.default, ([of(BF16), of(FP32, 8, WIDTH)],)),
    (aten.cat.default, ([of(FP32), of(BF16, 8, WIDTH), of(BF16)],)),
    (aten.cat.default, ([of(BF16), of(BF16)],)),
    (aten.sort.default, (of(LONG), 0)),
    (aten.sort.default, (of(FP32), 1)),
    (aten.sort.default, (of(LONG, 4000),)),
    (aten.convolution.default, (of(FP32, 64, 3, 2, 8, 8), of(FP32, 64, 3, 2, 8, 8), None, [2, 8, 8], [0] * 3, [1] * 3,
                                False, [0] * 3, 1)),
]  # fmt: skip


@pytest.mark.parametrize("func, args", OTHERS, ids=lambda value: str(value) if not isinstance(value, tuple) else "")
def test_softmaxes_cats_and_sorts(func: Any, args: tuple[Any, ...]) -> None:
    rises_to_what_torch_allocates(func, args, rel=5e-3)


def rises_to_what_torch_allocates(func: Any, args: tuple[Any, ...], rel: float) -> None:
    result = func(*args)
    tensors = [result] if isinstance(result, Tensor) else [t for t in result if t is not None]
    made = [t for t in tensors if all(t is not one for one in args)]
    known = sum(t.numel() * t.itemsize for t in made) + beside_results(func, args, result)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        again = func(*args)
    assert known == pytest.approx(peak_of(watched), rel=rel)
    del again


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", [3, 50, 300])
def test_eigenvectors_are_counted_to_the_byte(side: int, dtype: torch.dtype) -> None:
    matrix = torch.randn(side, side, dtype=dtype)
    matrix = matrix + matrix.mT
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        found = torch.linalg.eigh(matrix)
    more = beside_results(torch.ops.aten._linalg_eigh.default, [matrix], found)
    assert peak_of(watched) == sum(part.nbytes for part in found) + more
