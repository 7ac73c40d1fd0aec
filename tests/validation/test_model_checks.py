"""What a model must not be, and what must not be done to it: each an error that names the way out."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import ModelError, OptimizerError, PlanError, ZeroshardError


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def step(engine: zs.Engine, x: Tensor | None = None) -> float:
    engine.backward(engine(torch.ones(2, 4) if x is None else x).float().mean())
    return engine.step().grad_norm


def test_an_engine_around_a_part_with_an_engine_is_refused() -> None:
    model = net()
    first = zs.Engine(model, sgd)
    with pytest.raises(ModelError, match=r"The module '1' .* already belongs to an engine.*copy\.deepcopy\(model\)"):
        zs.Engine(nn.Sequential(nn.Linear(4, 4), model[0]), sgd)
    before = step(first)
    with first.gathered():
        second = zs.Engine(copy.deepcopy(model), sgd)
    assert step(second) > 0 and step(first) > 0 and before > 0


def test_a_refused_engine_leaves_the_model_free() -> None:
    model = net()
    with pytest.raises(PlanError, match=r"units names .*is no class.*Name a path or one of its classes: .*Linear"):
        zs.Engine(model, sgd, zs.Plan(units=("Blok",)))
    with pytest.raises(PlanError, match=r"no class and no path in the model\. Name a path or one of .*Linear"):
        zs.Engine(model, sgd, zs.Plan(fp32_modules=("Blok",)))
    assert step(zs.Engine(model, sgd)) > 0


class DistributedDataParallel(nn.Module):
    """Has the name of torch's, whose constructor wants a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def with_sparse_buffer() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    return model


@pytest.mark.parametrize(
    "model, message",
    [
        (nn.DataParallel(net()), r"The model is a DataParallel.*Give the engine its \.module"),
        (DistributedDataParallel(net()), r"The model is a DistributedDataParallel.*its \.module"),
        (nn.Sequential(nn.DataParallel(net())), "The module '0' of the model is a DataParallel"),
        (nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2)), "'1.weight' of LazyLinear has no shape yet.* on one batch"),
        (nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d()), "LazyBatchNorm1d has no shape yet"),
        (
            with_sparse_buffer(),
            r"'graph' is of layout torch\.sparse_coo.*indices and values.*a plain attribute of Linear",
        ),
    ],
)
def test_models_that_no_engine_can_take(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        zs.Engine(model, sgd)


def test_a_lazy_model_after_one_batch() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    model(torch.ones(2, 4))
    assert step(zs.Engine(model, sgd)) > 0


@pytest.mark.parametrize("zero", [0, 3])
def test_a_compiled_model_is_taken(zero: int) -> None:
    model = torch.compile(net(), backend="eager")
    assert step(zs.Engine(model, sgd, zs.Plan(zero=zero))) > 0


def test_several_optimizers_are_refused() -> None:
    model = net()
    with pytest.raises(OptimizerError, match=r"a list of 2 optimizers \(SGD, SGD\), and takes one.*parameter groups"):
        zs.Engine(model, [sgd(model[0].parameters()), sgd(model[1].parameters())])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.half(),
        lambda m: m.to("meta"),
        lambda m: m[1].double(),
        lambda m: m.to_empty(device="cpu"),
    ],
)
@pytest.mark.parametrize("plan", [zs.Plan(), zs.Plan(zero=1, precision="bf16")])
def test_a_model_is_not_converted_once_an_engine_has_it(plan: zs.Plan, change: Callable[[Any], Any]) -> None:
    model = net()
    engine = zs.Engine(model, sgd, plan)
    with pytest.raises(
        PlanError, match=r"'(0\.)?weight' .*cannot be converted or moved to .*before the engine is made"
    ):
        change(model)
    assert step(engine) > 0


def test_memory_formats_too() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    zs.Engine(model, sgd)
    with pytest.raises(PlanError, match=r"'0\.weight' .*cannot be converted"):
        model.to(memory_format=torch.channels_last)


def test_moves_to_where_the_model_is_do_nothing() -> None:
    model = net()
    engine = zs.Engine(model, sgd)
    assert model.to("cpu") is model and model.float() is model and model.cpu() is model
    weights = engine.state_dict()
    step(engine)
    assert not torch.equal(model[0].weight, weights["0.weight"])
    with engine.gathered():
        plain = copy.deepcopy(model)
    assert plain.double()[0].weight.dtype == torch.float64 and copy.deepcopy(plain).half()[0].weight.dtype == torch.half
    assert model[0].weight.dtype == torch.float32
    plain.load_state_dict(engine.state_dict(), assign=True)


def loads(mesh: zs.Mesh, settings: dict[str, Any]) -> tuple[list[str], bool, bool]:
    """What is said of loads outside and inside `gathered()`, and whether the latter stays after a step."""
    model = net()
    engine = zs.Engine(model, sgd, zs.Plan.from_dict(settings), mesh=mesh)
    wanted = {name: torch.full_like(value, 0.5) for name, value in engine.state_dict().items()}
    own = {name.removeprefix("1."): value for name, value in wanted.items() if name.startswith("1.")}
    said = []
    for load in (
        lambda: model.load_state_dict(wanted),
        lambda: model[1].load_state_dict(own),
        lambda: model.load_state_dict(wanted, assign=True),
    ):
        try:
            load()
            said.append("")
        except ZeroshardError as error:
            said.append(f"{type(error).__name__}: {error}")
    with engine.gathered():
        model.load_state_dict(wanted)
    loaded = all(torch.equal(value, wanted[name]) for name, value in engine.state_dict().items())
    engine.backward(engine(torch.zeros(2, 4)).float().sum() * 0.0)
    engine.step()
    stays = all(torch.equal(value, wanted[name]) for name, value in engine.state_dict().items())
    return said, loaded, stays


@pytest.mark.parametrize(
    "settings, lost",
    [
        ({"zero": 0}, ""),
        ({"zero": 1, "transport": "network"}, ""),
        ({"zero": 1, "precision": "bf16"}, "all ranks share it|fp32 master weights stayed"),
        ({"zero": 0, "precision": "bf16"}, "its fp32 master weights stayed as they were"),
        ({"zero": 3, "transport": "network"}, "its values were kept by other ranks"),
        ({"zero": 3, "offload": "optimizer,parameters"}, "its values were kept by other ranks"),
    ],
)
def test_load_state_dict_where_it_would_be_lost(pool: Pool, settings: dict[str, Any], lost: str) -> None:
    for (whole, part, assigned), loaded, stays in pool.run(loads, 2, settings):
        for said, name in ((whole, "0.weight"), (part, "weight")):
            if lost:
                assert f"PlanError: load_state_dict cannot write '{name}' now: " in said
                assert any(words in said for words in lost.split("|"))
                assert "`with engine.gathered(): model.load_state_dict(...)`" in said and "engine.load_weights" in said
            else:
                assert said == ""
        assert "assign=True puts new tensors into the model" in assigned
        assert loaded and stays


def parts(mesh: zs.Mesh) -> str:
    model = net()
    engine = zs.Engine(model, sgd, zs.Plan(zero=3, transport="network"), mesh=mesh)
    with engine.gathered():
        assert not model[1].state_dict()["weight"].isnan().any()
    with pytest.raises(PlanError) as found:
        model[1].state_dict()
    return str(found.value)


def test_the_state_dict_of_a_part_under_stage_3(pool: Pool) -> None:
    for said in pool.run(parts, 2):
        assert "'weight' in the state_dict would hold NaN. Use engine.state_dict()" in said


def staged(mesh: zs.Mesh) -> str:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    state = model.state_dict()
    engine = zs.Engine(
        model,
        sgd,
        zs.Plan(pipeline_parallel=2, microbatches=2),
        mesh=mesh,
        example=torch.ones(2, 4),
        loss=lambda out, _: out.sum(),
    )
    engine.train_step(torch.ones(4, 4))
    with pytest.raises(PlanError) as found:
        model.load_state_dict(state)
    return str(found.value)


def test_load_state_dict_of_a_model_in_stages(pool: Pool) -> None:
    for said in pool.run(staged, 2):
        assert "the model is cut into stages" in said and "engine.load_weights(path)" in said


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Adapted(nn.Module):
    """A frozen layer with two adapters beside it, of which one does not reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.used.weight)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.base(x)
        return h + self.used(h) * 0 + self.unused(h).detach()


def steps_of(model: nn.Module, count: int, mesh: zs.Mesh | None = None) -> list[str]:
    """The warnings of unused parameters in a few steps."""
    engine = zs.Engine(model, sgd, zs.Plan(zero=3), mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            step(engine)
    return [str(each.message) for each in caught if issubclass(each.category, zs.UnusedParameterWarning)]


def test_an_adapter_without_a_gradient_in_the_first_steps_is_named() -> None:
    assert steps_of(Adapted(), 1) == []
    (found,) = steps_of(Adapted(), 4)
    assert found.startswith("'unused.bias', 'unused.weight' had no gradient on any rank in the first 2 steps")
    model = Adapted()
    model.unused.requires_grad_(False)
    assert steps_of(model, 3) == []
    model = Adapted()
    model.base.requires_grad_(True)  # parts of models without adapters may rest
    assert steps_of(model, 3) == []


def adapted_on_ranks(mesh: zs.Mesh) -> list[str]:
    torch.manual_seed(0)
    return steps_of(Adapted(), 3, mesh)


def test_the_first_rank_alone_names_unused_adapters(pool: Pool) -> None:
    assert [len(found) for found in pool.run(adapted_on_ranks, 2)] == [1, 0]
