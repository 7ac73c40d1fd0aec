"""Units are the outermost repeated blocks or the named modules, and every parameter is in exactly one."""

from collections.abc import Iterator

import pytest
import torch
from engine.models import MODELS, Nested, Plain, Tied, build
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.units import Unit, find_units


def names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


def linear() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


class Pair(nn.Module):
    """A block of two different modules, so nothing repeats inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = linear(), nn.LayerNorm(2)


class EncoderDecoder(nn.Module):
    """Two lists of blocks of different classes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Pair(), Pair()])
        self.decoder = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 4) for _ in range(3)])
        self.head = linear()


class Inverted(nn.Module):
    """A repeated block whose own children repeat too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(linear(), nn.ReLU(), linear()), nn.Sequential(linear(), nn.ReLU())])


RULE = {
    "ModuleList": (Plain, ["blocks.0", "blocks.1", "blocks.2", ""]),
    "nested ModuleLists": (Nested, ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", ""]),
    "encoder and decoder": (EncoderDecoder, ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2", ""]),
    "Sequential": (lambda: nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU()), ["0", "2", ""]),
    "Sequential of Sequentials": (
        lambda: nn.Sequential(nn.Sequential(linear(), nn.LayerNorm(2)), nn.Sequential(linear(), nn.LayerNorm(2))),
        ["0", "1", ""],
    ),
    "repeats inside one of two Sequentials": (Inverted, ["blocks.0.0", "blocks.0.2", "blocks.1", ""]),
    "ModuleDict": (lambda: nn.ModuleDict({"a": Pair(), "b": Pair(), "c": linear()}), ["a", "b", ""]),
    "a single block": (lambda: nn.ModuleList([Pair()]), [""]),
    "classes that do not repeat": (lambda: nn.Sequential(linear(), nn.LayerNorm(2)), [""]),
    "fields that repeat outside a list": (Pair, [""]),
    "repeated modules without parameters": (lambda: nn.Sequential(nn.ReLU(), nn.ReLU(), linear()), [""]),
    "no parameters at all": (nn.ReLU, [""]),
}


@pytest.mark.parametrize("case", RULE)
def test_the_rule(case: str) -> None:
    make, expected = RULE[case]
    units = find_units(make())
    assert names(units) == expected
    assert [unit.number for unit in units] == list(range(len(expected)))
    assert units[-1].label == "root"


def test_named_by_class_by_path_and_both() -> None:
    model = Nested()
    assert names(find_units(model, ["Block"])) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", ""]
    assert names(find_units(model, ["stages.1"])) == ["stages.1", ""]
    both = ["head", "stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", ""]  # nothing is left for stages.1 itself
    assert names(find_units(model, ["Block", "head", "stages.1"])) == both
    assert names(find_units(model, ())) == [""]


def test_nested_units_keep_what_the_inner_ones_leave() -> None:
    assert {unit.name: list(unit.parameters) for unit in find_units(Plain(1), ["Block", "blocks.0.up"])} == {
        "blocks.0": ["blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.0.down.weight", "blocks.0.down.bias"],
        "blocks.0.up": ["blocks.0.up.weight", "blocks.0.up.bias"],
        "": ["embed.weight", "head.weight"],
    }


@pytest.mark.parametrize(
    "wanted, hint", [("Blok", "'Block'"), ("blocks.9", "'blocks"), ("zzz", "Embedding, LayerNorm")]
)
def test_a_misspelt_name_gets_a_suggestion(wanted: str, hint: str) -> None:
    with pytest.raises(PlanError, match=wanted) as error:
        find_units(Plain(), ["Block", wanted])
    assert hint in str(error.value)


def test_a_name_like_a_prefix_is_another_module() -> None:
    model = nn.ModuleList([Pair() for _ in range(11)])
    units = {unit.name: list(unit.parameters) for unit in find_units(model, ["1"])}
    assert units["1"] == ["1.up.weight", "1.norm.weight", "1.norm.bias"]
    assert "10.up.weight" in units[""]


def test_a_tied_parameter_lives_once_at_the_root() -> None:
    model = Tied()
    units = find_units(model)
    assert list(units[-1].parameters) == ["embed.weight"]
    assert units[-1].owners == [model.embed, model.head]


def test_a_parameter_tied_inside_a_unit_stays_there() -> None:
    model = Plain(2)
    model.blocks[1].up.weight = model.blocks[1].down.weight = nn.Parameter(torch.ones(1))
    units = find_units(model)
    assert "blocks.1.up.weight" in units[1].parameters and "blocks.1.down.weight" not in units[1].parameters
    assert units[1].owners == [model.blocks[1].norm, model.blocks[1].up, model.blocks[1].down]


def test_a_parameter_tied_between_units_goes_to_the_unit_around_both() -> None:
    model = Nested()
    model.stages[1][0].up.weight = model.stages[1][1].up.weight
    units = {unit.name: list(unit.parameters) for unit in find_units(model, ["stages.0", "stages.1", "Block"])}
    assert units["stages.1"] == ["stages.1.0.up.weight"]
    assert "stages.0" not in units and "stages.1.1.up.weight" not in units["stages.1.1"]


def test_one_module_in_two_lists_is_one_unit() -> None:
    model = nn.Module()
    model.down = nn.ModuleList([Pair(), Pair()])
    model.up = nn.ModuleList(reversed(model.down))
    model.head = linear()
    units = find_units(model)
    assert [unit.module for unit in units] == [*model.down, model]
    assert names(units) == ["down.0", "down.1", ""]
    assert [sorted(unit.parameters) for unit in units] == [
        ["down.0.norm.bias", "down.0.norm.weight", "down.0.up.weight"],
        ["down.1.norm.bias", "down.1.norm.weight", "down.1.up.weight"],
        ["head.weight"],
    ]


def test_a_module_shared_by_two_units_goes_to_the_unit_around_both() -> None:
    model = nn.ModuleList([Pair(), Pair()])
    model[1].up = model[0].up
    units = {unit.name: list(unit.parameters) for unit in find_units(model)}
    assert units[""] == ["0.up.weight"]


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_the_awkward_models_is_in_one_unit(name: str) -> None:
    model = build(name)
    assert_placed(model, find_units(model))


def chains(
    module: nn.Module, above: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[tuple[nn.Module, ...], nn.Parameter]]:
    """Every way from the root to a parameter: the modules passed, outermost first."""
    here = (*above, module)
    yield from ((here, parameter) for parameter in module._parameters.values() if parameter is not None)
    for child in module._modules.values():
        if child is not None:
            yield from chains(child, here)


def assert_placed(model: nn.Module, units: list[Unit]) -> None:
    """By brute force: each parameter in the innermost unit on all ways to it, named, in registration order."""
    ways: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    for chain, parameter in chains(model):
        ways.setdefault(parameter, []).append(chain)
    home = {unit.module: unit for unit in units}
    held = [parameter for unit in units for parameter in unit.parameters.values()]
    assert len(held) == len(set(held)) == len(ways)
    for parameter, all_ways in ways.items():
        innermost = [module for module in all_ways[0] if module in home and all(module in way for way in all_ways)][-1]
        assert any(parameter is other for other in home[innermost].parameters.values())
        owners = {way[-1] for way in all_ways}
        assert owners <= set(home[innermost].owners)
    first_names = dict(model.named_parameters())
    assert all(first_names[name] is p for unit in units for name, p in unit.parameters.items())
    modules = dict(model.named_modules())
    assert all(modules[unit.name] is unit.module for unit in units)


LEAVES = st.sampled_from([linear, nn.ReLU, Pair, lambda: nn.LayerNorm(2)]).map(lambda make: make())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.tuples(st.sampled_from([nn.Sequential, nn.ModuleList]), st.lists(inner, max_size=4)).map(
        lambda made: made[0](*made[1]) if made[0] is nn.Sequential else made[0](made[1])
    ),
    max_leaves=12,
)


@settings(derandomize=True, deadline=None)
@given(TREES, st.data())
def test_every_parameter_of_any_model_is_in_one_unit(tree: nn.Module, data: st.DataObject) -> None:
    model = nn.ModuleList([tree, linear()])
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    chosen = st.sampled_from(linears)
    for _ in range(data.draw(st.integers(0, 3))):
        data.draw(chosen).weight = data.draw(chosen).weight
    paths = [path for path, _ in model.named_modules() if path]
    wanted = data.draw(st.none() | st.lists(st.sampled_from(paths), max_size=4))
    assert_placed(model, find_units(model, wanted))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), max_size=4))
def test_every_parameter_of_a_model_with_shared_modules_is_in_one_unit(left: list[int], right: list[int]) -> None:
    blocks = [Pair() for _ in range(3)]
    model = nn.ModuleList([nn.ModuleList(blocks[n] for n in left), nn.Sequential(*(blocks[n] for n in right))])
    assert_placed(model, find_units(model))
