"""Modules whose parameters were cut are initialised as they were before, and their parts cut out of the values."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.units.materialise import Materialiser
from zeroshard.units.uncut import take_from_rank_0

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
