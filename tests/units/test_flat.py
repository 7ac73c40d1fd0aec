"""The user's parameters are views of a flat buffer, or NaN of their true shape while it is away."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zeroshard.units import Entry, Flat, Index, find_units, norm_of, written_while_absent
from zeroshard.units.flat import TILE


class Odd(nn.Module):
    """Parameters of awkward shapes: a matrix, a scalar, none, a vector; 6 + 1 + 0 + 4 = 11 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.scalar = nn.Parameter(torch.tensor(6.0))
        self.nothing = nn.Parameter(torch.empty(0, 5))
        self.vector = nn.Parameter(torch.arange(7.0, 11.0))


def flat_of(model: nn.Module, ranks: int = 4) -> tuple[Flat, Tensor]:
    """The one flat of a model and a buffer with its values, bound."""
    unit = find_units(model, ())[0]
    flat = Flat(unit, unit.parameters, torch.float32, trainable=True, ranks=ranks)
    buffer = torch.zeros(flat.index.padded_numel)
    for number, parameter in enumerate(flat.parameters):
        flat.view(buffer, number).copy_(parameter.detach())
    flat.bind(buffer)
    return flat, buffer


def test_the_buffer_holds_the_parameters_one_behind_the_other() -> None:
    flat, buffer = flat_of(Odd())
    assert buffer.tolist() == [*map(float, range(11)), 0.0]
    assert [view.shape for view in (flat.view(buffer, n) for n in range(4))] == [(2, 3), (), (0, 5), (4,)]


def test_attached_parameters_are_views() -> None:
    model = Odd()
    flat, buffer = flat_of(model)
    parameters = list(model.parameters())
    flat.attach()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    buffer.neg_()
    assert torch.equal(model.matrix, -torch.arange(6.0).view(2, 3)) and model.scalar.item() == -6
    with torch.no_grad():
        model.vector.fill_(3)
    assert buffer[7:].tolist() == [3, 3, 3, 3, 0]


def test_detached_parameters_read_nan_in_their_true_shape() -> None:
    model = Odd()
    shapes = [parameter.shape for parameter in model.parameters()]
    flat, _ = flat_of(model)
    flat.attach()
    flat.detach()
    for parameter, shape in zip(model.parameters(), shapes, strict=True):
        assert parameter.shape == shape and parameter.isnan().all() and parameter.is_leaf
        assert parameter.untyped_storage().nbytes() == 4  # one NaN, however large the parameter
    assert not written_while_absent([flat])


@pytest.mark.parametrize("write", ["add_", "mul_", "copy_"])
def test_detached_parameters_refuse_writes(write: str) -> None:
    model = Odd()
    flat, buffer = flat_of(model)
    before = buffer.clone()
    flat.detach()
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        getattr(model.matrix, write)(torch.ones(2, 3))
    assert torch.equal(buffer, before) and not written_while_absent([flat])


def test_a_fill_that_cannot_be_refused_is_noticed() -> None:
    model = Odd()
    flat, buffer = flat_of(model)
    flat.detach()
    with torch.no_grad():
        model.vector.zero_()
    assert written_while_absent([flat]) == [0]
    flat.attach()
    assert model.vector.tolist() == [7, 8, 9, 10] and buffer[7:11].tolist() == [7, 8, 9, 10]


def test_values_come_back_bit_for_bit() -> None:
    model = Odd()
    flat, _ = flat_of(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        flat.detach()
        flat.attach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_dtype_reads_nan(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    unit = find_units(model, ())[0]
    flat = Flat(unit, unit.parameters, dtype, trainable=True, ranks=2)
    flat.bind(torch.zeros(flat.index.padded_numel, dtype=dtype))
    flat.detach()
    assert model.weight.dtype == dtype and model.weight.isnan().all()


def test_integers_have_no_nan_and_read_zero() -> None:
    model = nn.Module()
    model.codes = nn.Parameter(torch.tensor([3, 4, 5]), requires_grad=False)
    unit = find_units(model, ())[0]
    flat = Flat(unit, unit.parameters, torch.int64, trainable=False, ranks=2)
    flat.bind(torch.tensor([3, 4, 5, 0]))
    flat.detach()
    assert model.codes.tolist() == [0, 0, 0] and not written_while_absent([flat])
    flat.attach()
    assert model.codes.tolist() == [3, 4, 5]


def test_gradients_flow_to_attached_parameters() -> None:
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    flat, _ = flat_of(model)
    flat.attach()
    x = torch.randn(5, 3)
    for module in (model, plain):
        module(x).square().sum().backward()
    assert torch.equal(model.weight.grad, plain.weight.grad) and torch.equal(model.bias.grad, plain.bias.grad)


def test_the_label_tells_flats_apart() -> None:
    unit = find_units(Odd(), ())[0]
    assert Flat(unit, unit.parameters, torch.bfloat16, True, 1).label == "root[bfloat16]"
    assert Flat(unit, unit.parameters, torch.float32, False, 1).label == "root[float32, frozen]"


SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(torch.Size), max_size=6)
RANKS = st.integers(1, 9)
PROPERTY = settings(derandomize=True, deadline=None)


def lay_out(shapes: list[torch.Size], ranks: int) -> Index:
    """An index of parameters named by their number."""
    return Index.of([(str(number), shape) for number, shape in enumerate(shapes)], ranks)


def holders(shapes: list[torch.Size]) -> list[int]:
    """By brute force: the number of the parameter that holds each element."""
    return [number for number, shape in enumerate(shapes) for _ in range(torch.zeros(shape).numel())]


def test_a_typed_example() -> None:
    index = Index.of([("a", torch.Size((2, 3))), ("b", torch.Size(())), ("c", torch.Size((4,)))], ranks=4)
    assert [(e.offset, e.stop, e.numel) for e in index.entries] == [(0, 6, 6), (6, 7, 1), (7, 11, 4)]
    assert index.entries[0] == Entry("a", torch.Size((2, 3)), 0, 6)
    assert (index.numel, index.slice_numel(0), index.padded_numel, index.padding) == (11, 3, 12, 1)
    assert [index.interval(rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert list(index.overlaps(3, 9)) == [(0, 3, 6), (1, 6, 7), (2, 7, 9)]


def test_nothing_at_all() -> None:
    index = Index.of([], ranks=3)
    assert (index.numel, index.padded_numel, index.padding, list(index.overlaps(0, 0))) == (0, 0, 0, [])


@PROPERTY
@given(SHAPES, RANKS)
def test_intervals_tile_the_padded_buffer(shapes: list[torch.Size], ranks: int) -> None:
    index = lay_out(shapes, ranks)
    elements = [element for rank in range(ranks) for element in range(*index.interval(rank))]
    assert elements == list(range(index.padded_numel))
    assert index.numel == len(holders(shapes))
    assert index.padding == index.padded_numel - index.numel
    assert 0 <= index.padding < ranks


@PROPERTY
@given(SHAPES, RANKS)
def test_overlaps_cover_every_element_once(shapes: list[torch.Size], ranks: int) -> None:
    index = lay_out(shapes, ranks)
    covered = [
        (element, number)
        for rank in range(ranks)
        for number, low, high in index.overlaps(*index.interval(rank))
        for element in range(low, high)
    ]
    assert covered == list(enumerate(holders(shapes)))


@PROPERTY
@given(SHAPES, RANKS)
def test_padding_of_the_slices_adds_up(shapes: list[torch.Size], ranks: int) -> None:
    index = lay_out(shapes, ranks)
    for rank in range(ranks):
        start, stop = index.interval(rank)
        assert index.padding_in(start, stop) == sum(element >= index.numel for element in range(start, stop))
    assert sum(index.padding_in(*index.interval(rank)) for rank in range(ranks)) == index.padding


@PROPERTY
@given(SHAPES.filter(lambda shapes: bool(shapes)), RANKS)
def test_number_at_finds_the_holder(shapes: list[torch.Size], ranks: int) -> None:
    index, expected = lay_out(shapes, ranks), holders(shapes)
    assert [index.number_at(element) for element in range(index.numel)] == expected
    assert all(index.number_at(element) == len(shapes) - 1 for element in range(index.numel, index.padded_numel))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 1000, TILE, 2 * TILE + 77])
def test_the_norm_of_any_dtype(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = norm_of(values)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), torch.linalg.vector_norm(values.double()), rtol=1e-5, atol=0)


def test_what_is_not_finite_shows() -> None:
    for bad in (torch.inf, torch.nan):
        values = torch.ones(3 * TILE, dtype=torch.bfloat16)
        values[-1] = bad
        assert not norm_of(values).isfinite()
