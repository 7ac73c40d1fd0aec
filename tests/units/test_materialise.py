"""Initial weights depend on the seed and on the module's path alone."""

import hashlib
import itertools
import random
import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from engine.models import MODELS, Tied
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import ModelError
from zeroshard.units.materialise import Materialiser, seed_of, take_from_rank_0


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def materialised(
    model: nn.Module,
    seed: int = 0,
    order: Iterable[nn.Module] | None = None,
    initialise: Callable[[nn.Module], object] | None = None,
) -> dict[str, Tensor]:
    """The model's values after its modules became real in an order (by default, registration order)."""
    materialiser = Materialiser(model, seed, initialise)
    for module in order or list(model.modules()):
        materialiser.materialise(module)
    return dict(model.state_dict())


def assert_same(values: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert values.keys() == others.keys()
    for name, value in values.items():
        assert torch.equal(value, others[name]), name


class Attention(nn.Module):
    """Attention, whose initialisation reaches into its child, with a norm and buffers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)


class Extra(nn.Linear):
    """A Linear with one more tensor, which the inherited reset_parameters() does not know."""

    def __init__(self, kind: str) -> None:
        super().__init__(2, 2)
        if kind == "parameter":
            self.gain = nn.Parameter(torch.ones(2))
        else:
            self.register_buffer(
                "mask", {"float": torch.ones(2), "bool": torch.ones(2).bool(), "int": torch.arange(2)}[kind]
            )


class Bare(nn.Module):
    """A module that cannot initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_seed_of_is_blake2b() -> None:
    expected = int.from_bytes(hashlib.blake2b(b"7/blocks.0/3", digest_size=8).digest(), "big") // 2
    assert seed_of(7, "blocks.0", 3) == expected
    assert 0 <= expected < 2**63
    assert len({seed_of(seed, path) for seed in range(20) for path in ("", "a", "b", "a.b")}) == 80


@pytest.mark.parametrize("seed", [0, 5])
def test_a_module_gets_the_numbers_of_its_path(seed: int) -> None:
    values = materialised(on_meta(lambda: nn.Sequential(nn.Linear(3, 2), nn.Embedding(5, 3))), seed)
    for path, make in (("0", lambda: nn.Linear(3, 2)), ("1", lambda: nn.Embedding(5, 3))):
        torch.manual_seed(
            int.from_bytes(hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest(), "big") // 2
        )
        for name, value in make().state_dict().items():
            assert torch.equal(values[f"{path}.{name}"], value)


@pytest.mark.parametrize("make", [*MODELS.values(), Attention], ids=lambda make: make.__name__)
def test_the_order_changes_nothing(make: Callable[[], nn.Module]) -> None:
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.normal_()

    initialise = fill if make.__name__ == "Tiny" else None
    expected = materialised(on_meta(make), initialise=initialise)
    for seed in range(4):
        model = on_meta(make)
        order = random.Random(seed).sample(list(model.modules()), len(list(model.modules())))
        assert_same(materialised(model, order=order, initialise=initialise), expected)
    model = on_meta(make)
    assert_same(materialised(model, order=reversed(list(model.modules())), initialise=initialise), expected)


def test_a_neighbour_changes_nothing() -> None:
    alone = materialised(on_meta(lambda: nn.ModuleDict({"b": nn.Linear(3, 3)})))
    beside = materialised(
        on_meta(lambda: nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(3, 3), "c": nn.Linear(1, 1)}))
    )
    assert torch.equal(alone["b.weight"], beside["b.weight"])


def test_paths_and_seeds_differ() -> None:
    make = lambda: nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])  # noqa: E731
    weights = [
        value for seed in (0, 1) for name, value in materialised(on_meta(make), seed).items() if "weight" in name
    ]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(weights, 2))


def test_the_callers_random_numbers_are_untouched() -> None:
    model = on_meta(Attention)
    before = torch.get_rng_state()
    materialised(model)
    with pytest.raises(ModelError):
        materialised(on_meta(Bare))
    with pytest.raises(ZeroDivisionError):
        materialised(on_meta(Bare), initialise=lambda module: torch.rand(3) / (1 // 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_parameters_are_one_and_come_from_the_first_owner() -> None:
    model = on_meta(Tied)
    before = model.embed.weight
    materialiser = Materialiser(model, 0)
    materialiser.materialise(model.head)
    assert model.embed.weight is model.head.weight is materialiser.real(before)
    plain = materialised(on_meta(lambda: nn.ModuleDict({"embed": nn.Embedding(13, 10)})))
    assert torch.equal(model.head.weight, plain["embed.weight"])
    materialiser.materialise(model.embed)
    assert torch.equal(model.head.weight, plain["embed.weight"]) and model.embed.weight is model.head.weight


def test_one_parameter_under_two_names_of_one_module() -> None:
    def make() -> nn.Module:
        module = nn.Bilinear(2, 2, 2)
        module.again = module.weight
        return module

    model = on_meta(make)
    materialised(model)
    assert model.again is model.weight and not model.weight.isnan().any()


def test_attention_is_initialised_as_in_torch() -> None:
    model = on_meta(Attention)
    values = materialised(model)
    assert not values["attention.in_proj_bias"].any() and not values["attention.out_proj.bias"].any()
    bound = (6 / (8 + 24)) ** 0.5  # Xavier, of in_proj_weight [24, 8]
    assert 0.9 * bound < values["attention.in_proj_weight"].abs().max() <= bound
    model.attention(*(torch.randn(3, 1, 8),) * 3)


def test_buffers_get_the_modules_values() -> None:
    values = materialised(on_meta(Attention))
    assert values["norm.running_mean"].tolist() == [0] * 8 and values["norm.running_var"].tolist() == [1] * 8
    assert values["norm.num_batches_tracked"].item() == 0
    assert values["norm.weight"].tolist() == [1] * 8


@pytest.mark.parametrize("kind, name", [("float", "mask"), ("bool", "mask"), ("int", "mask"), ("parameter", "gain")])
def test_what_gets_no_values_is_an_error(kind: str, name: str) -> None:
    with pytest.raises(ModelError, match=f"'0.{name}'.*reset_parameters.*CPU"):
        materialised(on_meta(lambda: nn.Sequential(Extra(kind))))


@pytest.mark.parametrize("kind", ["float", "bool", "int", "parameter"])
def test_an_initialise_function_gives_all_values(kind: str) -> None:
    def ones(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(1)

    assert all((value == 1).all() for value in materialised(on_meta(lambda: Extra(kind)), initialise=ones).values())


def test_a_module_that_cannot_initialise_itself() -> None:
    with pytest.raises(ModelError, match=r"Bare at '1' .*initialise=.*CPU"):
        materialised(on_meta(lambda: nn.Sequential(nn.Linear(1, 1), Bare())))
    with pytest.raises(ModelError, match="Bare at 'the model itself'"):
        materialised(on_meta(Bare))


def test_initialise_is_called_once_with_each_owner() -> None:
    called: list[nn.Module] = []
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2))))

    def constant(module: nn.Module) -> None:
        called.append(module)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(3)

    materialiser = Materialiser(model, 0, constant)
    for module in [*model.modules(), *model.modules()]:
        materialiser.materialise(module)
    assert called == [model[0], model[2][0]]
    assert all((value == 3).all() for value in model.state_dict().values())


def test_what_is_real_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    materialiser = Materialiser(model, 0, initialise=lambda module: 1 / 0)
    for module in model.modules():
        materialiser.materialise(module)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] is materialiser.real(parameter) and torch.equal(parameter, before[name][1])


def test_real_parameters_beside_meta_ones_keep_their_values() -> None:
    model = on_meta(lambda: nn.Linear(2, 2))
    model.bias = nn.Parameter(torch.tensor([5.0, 6.0]))
    values = materialised(model)
    assert values["bias"].tolist() == [5, 6] and not values["weight"].is_meta


def test_dtype_and_trainability_stay() -> None:
    model = on_meta(lambda: nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False))
    materialised(model)
    assert model.weight.dtype == torch.bfloat16 and not model.weight.requires_grad and model.weight.device.type == "cpu"


def test_a_module_without_tensors_needs_nothing() -> None:
    assert materialised(on_meta(lambda: nn.Sequential(nn.ReLU(), nn.Dropout()))) == {}


def test_hooks_on_gradients_stay_and_can_be_removed() -> None:
    model, seen = on_meta(lambda: nn.Linear(2, 2)), list[str]()
    model.weight.register_hook(lambda gradient: seen.append("weight"))
    handle = model.bias.register_hook(lambda gradient: seen.append("bias"))
    model.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("done"))
    materialised(model)
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(seen) == ["bias", "done", "weight"]
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(seen[3:]) == ["done", "weight"]


Halved = dict[nn.Parameter, Callable[[Tensor], Tensor]]


class Scaled(nn.Module):
    """Gives values to its child's weight, by an attribute, and has a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = 6
        self.inner = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.empty(6))
        self.register_buffer("count", torch.empty(2))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.inner.weight, std=self.features**-0.5)
        nn.init.uniform_(self.scale)
        self.count.fill_(self.features)


class Model(nn.Module):
    """Embedding, two blocks, and an output layer that is tied to the embedding and has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, padding_idx=5)
        self.blocks = nn.ModuleList([Scaled(), Scaled()])
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight


def cut(model: Model) -> Halved:
    """Keep the first half of the rows of all matrices and of the biases of linear layers."""
    halved: Halved = {}
    sites: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, whole in list(module._parameters.items()):
            if whole is not None and not isinstance(module, Scaled):
                if whole not in sites:
                    sites[whole] = nn.Parameter(whole.detach()[: len(whole) // 2].clone())
                    halved[sites[whole]] = lambda values: values[: len(values) // 2].clone()
                module._parameters[name] = sites[whole]
        if isinstance(module, nn.Linear):
            module.out_features = 3
        if isinstance(module, Scaled):
            module.features, module.forward = 3, lambda x: x
    model.embed.padding_idx = None
    return halved


def values_of(seed: int, cuts: bool, order: Callable[[Model], list[nn.Module]]) -> tuple[Model, dict[str, Tensor]]:
    with torch.device("meta"):
        model = Model()
    materialiser = Materialiser(model, seed)
    if cuts:
        materialiser.uncut.keep(model)
        before = dict(model.named_parameters())
        parts = cut(model)
        materialiser.uncut.cut(model, parts)
        assert before.keys() == dict(model.named_parameters()).keys()
        metas = dict(model.named_parameters())
    for module in order(model):
        materialiser.materialise(module)
    if cuts:
        for name, parameter in model.named_parameters():
            assert materialiser.real(metas[name]) is parameter
    return model, {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}


ORDERS: dict[str, Callable[[Model], list[nn.Module]]] = {
    "parents first": lambda model: list(model.modules()),
    "head first": lambda model: [model.head, *model.modules()],
    "units": lambda model: [*model.blocks, model.embed, model.head, *model.modules()],
}


@pytest.mark.parametrize("order", ORDERS)
def test_parts_are_those_of_the_whole_model(order: str) -> None:
    _, wanted = values_of(3, False, ORDERS[order])
    model, found = values_of(3, True, ORDERS[order])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        whole = name.endswith(("scale", "count"))
        assert torch.equal(found[name], value if whole else value[: len(value) // 2]), name
    assert model.head.weight is model.embed.weight and model.head.weight.shape == (3, 4)
    assert (model.embed.padding_idx, model.head.out_features, model.blocks[0].features) == (None, 3, 3)
    assert model.blocks[0].forward(1) == 1 and model.blocks[0].count.tolist() == [6, 6]


def test_whole_values_are_gone_when_the_next_module_begins() -> None:
    with torch.device("meta"):
        model = Model()
    alive: list[weakref.ref[Tensor]] = []
    seen = []

    def initialise(module: nn.Module) -> None:
        seen.append(sum(ref() is not None for ref in alive))
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data.fill_(1.0)
            alive.append(weakref.ref(tensor))
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, 4)

    materialiser = Materialiser(model, 0, initialise)
    materialiser.uncut.keep(model)
    materialiser.uncut.cut(model, cut(model))
    for module in (*model.blocks, model.embed, model.head):
        materialiser.materialise(module)
    assert seen == [0, 2, 2, 4, 4, 4]  # a block sees those of its linear layer, and the next one scales and counts


def test_a_module_in_the_place_of_another_gets_its_values() -> None:
    class Half(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(4, 2))
    materialiser = Materialiser(model, 1)
    materialiser.uncut.keep(model)
    model[0] = Half(model[0].weight.detach()[:3])
    materialiser.uncut.cut(model, {model[0].weight: lambda values: values[:3].clone()})
    for module in model.modules():
        materialiser.materialise(module)
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(4, 2))
    whole = Materialiser(plain, 1)
    for module in plain.modules():
        whole.materialise(module)
    assert torch.equal(model[0].weight, plain[0].weight[:3]) and torch.equal(model[1].weight, plain[1].weight)


def test_real_parameters_are_left_alone() -> None:
    model = nn.Linear(4, 6)
    materialiser = Materialiser(model, 1)
    materialiser.uncut.keep(model)
    part = nn.Parameter(model.weight.detach()[:3].clone())
    kept = part.detach().clone()
    model._parameters["weight"] = part
    materialiser.uncut.cut(model, {part: lambda values: values[:3]})
    materialiser.materialise(model)
    assert model.weight is part and torch.equal(part, kept) and materialiser.real(part) is part


def test_one_rank_keeps_its_values() -> None:
    model = nn.Linear(4, 6)
    before = model.weight.detach().t().clone().t()
    model.weight.data = before.clone(memory_format=torch.preserve_format)  # columns first
    take_from_rank_0(model, Comm(Mesh()))
    assert torch.equal(model.weight, before)
