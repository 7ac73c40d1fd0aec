"""Parameters whose update runs on the host while the user reads them, against an engine that is flushed after a step.

Under the executor `latest` an update runs only where something waits for it, so a read that does not wait sees old
values in every run.
"""

import copy
import gc
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from inside import parts_of
from offload.offloaded import executing
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import linear
from zero.test_overlap_gather import Block

import zeroshard as zs
from zeroshard.parts.weights import Residence

WIDTH = 8
PLANS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3 on one rank or in shared memory": {"zero": 3},
    "norm first": {"zero": 2, "offload.speculate": False},
    "16 bits": {"zero": 2, "precision": "bf16"},
    "half of the units": {"zero": 2, "offload.fraction": 0.5},
    "network": {"zero": 2, "transport": "network"},
    "sliced": {"zero": 3, "transport": "network"},
    "sliced and offloaded": {"zero": 3, "offload": "optimizer,parameters"},
}


class Net(nn.Module):
    """Reads weights of later blocks first, and has a penalty over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = linear(self.first(x), self.blocks[2].up.weight)
        x = x + torch.stack([block.norm.weight for block in self.blocks]).sum(0)
        for block in self.blocks:
            x = block(x)
        penalty = sum(p.float().square().sum() for p in self.parameters())
        return x.float().square().mean() + 0.1 * penalty


def make(mesh: zs.Mesh | None, **options: Any) -> zs.Engine:
    torch.manual_seed(0)
    plan = zs.Plan.from_dict({"offload": "optimizer", **options})
    return zs.Engine(Net(), partial(torch.optim.AdamW, lr=0.05), plan, mesh=mesh)


def train(engine: zs.Engine, step: int, flush: bool = False) -> Tensor:
    loss: Tensor = engine(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step)))
    engine.backward(loss)
    engine.step()
    if flush:
        engine.flush()
    return loss.detach()


def arriving(engine: zs.Engine) -> bool:
    return {part.weights.residence for part in parts_of(engine).all} == {Residence.ARRIVING}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def read_in_forwards(mesh: zs.Mesh | None, name: str) -> bool:
    found = []
    with executing("latest"):
        for flush in (False, True):
            engine = make(mesh, **PLANS[name])
            found.append([train(engine, step, flush) for step in range(4)] + list(engine.state_dict().values()))
    return equal(*found)


@pytest.mark.parametrize("name", PLANS)
def test_weights_that_a_forward_reads_before_their_module_are_new(name: str) -> None:
    assert read_in_forwards(None, name)


def all_read_in_forwards(mesh: zs.Mesh) -> list[str]:
    return [name for name in PLANS if not read_in_forwards(mesh, name)]


def test_weights_that_a_forward_reads_are_new_on_two_ranks(pool: Pool) -> None:
    assert pool.run(all_read_in_forwards, 2) == [[], []]


def _plain(call: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return call()


def _saved(model: Net) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(list(model.blocks[1].parameters()), file)
    file.seek(0)
    return [p.detach() for p in torch.load(file, weights_only=True)]


READS: dict[str, Callable[[Net], Any]] = {
    "operation": lambda m: (m.blocks[1].up.weight + 1).detach(),
    "data": lambda m: m.blocks[0].up.bias.data.clone(),
    "detach": lambda m: m.first.weight.detach().clone(),
    "numpy": lambda m: m.blocks[2].up.weight.detach().numpy().tolist(),
    "pointer": lambda m: (m.first.weight.data_ptr() > 0, m.first.weight.tolist()),
    "storage": lambda m: m.first.bias.untyped_storage().tolist() and m.first.bias.tolist(),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).detach(),
    "foreach": lambda m: _plain(lambda: torch._foreach_mul(list(m.parameters()), 2.0)),
    "average": lambda m: _plain(lambda: [torch.zeros(p.shape).lerp_(p, 0.5) for p in m.parameters()]),
    "norm": lambda m: nn.utils.get_total_norm(list(m.parameters())).detach(),
    "state_dict": lambda m: [value.clone() for value in m.state_dict().values()],
    "state_dict of a block": lambda m: [value.clone() for value in m.blocks[1].state_dict().values()],
    "deepcopy": lambda m: [p.detach() for p in copy.deepcopy(m).parameters()],
    "torch.save": _saved,
    "a part of the model": lambda m: m.blocks[2].up(torch.ones(1, WIDTH)).detach(),
    "a part of the root": lambda m: m.first(torch.ones(1, WIDTH)).detach(),
    "evaluation": lambda m: _plain(lambda: m(torch.ones(1, WIDTH))),
}


def read_between_steps(mesh: zs.Mesh | None, options: dict[str, Any]) -> list[tuple[str, bool, bool]]:
    found = []
    with executing("latest"):
        overlapped, flushed = make(mesh, **options), make(mesh, **options)
        for step, (name, read) in enumerate(READS.items()):
            train(overlapped, step)
            train(flushed, step, flush=True)
            pending = arriving(overlapped)
            found.append((name, pending, equal(read(overlapped.model), read(flushed.model))))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_reads_between_steps_wait_for_the_update(pool: Pool, ranks: int) -> None:
    for options in ({"zero": 2}, {"zero": 2, "transport": "network"}, {"zero": 3})[: 3 if ranks > 1 else 1]:
        for found in pool.run(read_between_steps, ranks, options):
            assert [name for name, pending, _ in found if not pending] == []
            assert [name for name, _, same in found if not same] == []


def test_what_cannot_wait_reads_nan_and_never_old_values() -> None:
    with executing("latest"):
        engine = make(None)
        train(engine, 0)
        weight = engine.model.first.weight
        with torch._C.DisableTorchFunction():
            assert bool((weight * 2).isnan().all())
        engine.flush()
        with torch._C.DisableTorchFunction():
            assert not bool((weight * 2).isnan().any())


ALIASES: dict[str, Callable[[Net], Any]] = {
    "detached": lambda m: m.blocks[1].up.weight.detach(),
    "data": lambda m: m.blocks[1].up.weight.data,
    "view": lambda m: m.blocks[1].up.weight[:],
    "array": lambda m: m.blocks[1].up.weight.detach().numpy(),
}


@pytest.mark.parametrize("delayed", [False, True])
def test_a_tensor_that_the_user_keeps_is_new_as_the_step_ends(delayed: bool) -> None:
    options = {"offload.delayed_update": True, "offload.delayed_warmup": 1} if delayed else {}
    with executing("eager"):
        eager = make(None, **options)
    with executing("latest"):
        late = make(None, **options)
    for step, alias in enumerate(ALIASES.values()):
        kept = alias(late.model)
        train(late, step)
        train(eager, step)
        assert equal(torch.as_tensor(kept).tolist(), eager.model.blocks[1].up.weight.tolist())
        del kept


def test_each_unit_waits_for_its_own_update_alone() -> None:
    """A usual model's forward still runs beside the updates of its later units."""
    with executing("latest"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)))
        engine = zs.Engine(model, partial(torch.optim.AdamW, lr=0.05), zs.Plan(zero=2, offload="optimizer"))
        seen: list[int] = []

        def count(*_: Any) -> None:
            seen.append(sum(part.weights.residence is Residence.ARRIVING for part in parts_of(engine).all))

        for step in range(3):
            engine.backward(engine(torch.ones(2, WIDTH) * step).square().mean())
            engine.step()
        for block in model:
            block.norm.register_forward_hook(count)
        engine(torch.ones(2, WIDTH))
        assert seen == [3, 2, 1, 0]


def test_parameters_that_outlive_the_engine_have_their_values() -> None:
    with executing("latest"):
        engine, flushed = make(None), make(None)
        train(engine, 0)
        train(flushed, 0, flush=True)
        parameters = list(engine.model.parameters())
        del engine
        gc.collect()
        assert equal([p.tolist() for p in parameters], [p.tolist() for p in flushed.model.parameters()])
