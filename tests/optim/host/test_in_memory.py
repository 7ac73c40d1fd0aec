"""Adam in memory on CPUs: the bits of an offloaded update, under torch's own object."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroshard as zs
from zeroshard.optim.host.adam import adam_update
from zeroshard.optim.host.states import HostStates, Scalars
from zeroshard.platform.accelerator import as_on_devices

Kind = Callable[..., torch.optim.Optimizer]
KINDS = [torch.optim.Adam, torch.optim.AdamW]
SHAPES = [(17, 9), (300,), (), (2, 3, 4)]


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def stepped(optimizer: torch.optim.Optimizer, members: list[Any], steps: int = 6) -> list[Tensor]:
    """The parameters after some steps, in the third of which the first has no gradient."""
    random = torch.Generator().manual_seed(4)
    for step in range(steps):
        for number, parameter in enumerate(members):
            gradient = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
            parameter.grad = None if (step, number) == (2, 0) else gradient
        optimizer.step()
    return [parameter.detach().clone() for parameter in members]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_the_host_adam(kind: Kind) -> None:
    """With a schedule, two groups, and a parameter that misses a step."""
    members = parameters()
    groups = [{"params": members[:2], "lr": 0.1}, {"params": members[2:], "weight_decay": 0.2}]
    optimizer = zs.optim.fast_on_cpus(kind(groups, lr=0.01, weight_decay=0.0))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    starts = [parameter.detach().clone().view(-1) for parameter in members]
    made = stepped(optimizer, members)
    random = torch.Generator().manual_seed(4)
    wanted = [HostStates(start, torch.zeros_like(start), torch.zeros_like(start)) for start in starts]
    counts = [0] * len(members)
    for step in range(6):
        for number, states in enumerate(wanted):
            gradient = torch.randn(members[number].shape, generator=random)
            if (step, number) == (2, 0):
                continue
            counts[number] += 1
            rate, decay = (0.1, 0.0) if number < 2 else (0.01, 0.2)
            group = {**optimizer.param_groups[0], "lr": rate * 0.9**step, "weight_decay": decay}
            scalars = Scalars.of(group, counts[number], kind is torch.optim.AdamW)
            adam_update(gradient.view(-1), 1.0, scalars, states, states)
    for parameter, values, states, count in zip(members, made, wanted, counts, strict=True):
        torch.testing.assert_close(values.view(-1), states.master, rtol=1e-7, atol=0)  # 0.9**step is not the schedule's
        kept = optimizer.state[parameter]
        assert [*kept] == ["step", "exp_avg", "exp_avg_sq"]
        assert kept["step"].item() == count
        assert torch.equal(kept["exp_avg"].view(-1), states.exp_avg)
        assert torch.equal(kept["exp_avg_sq"].view(-1), states.exp_avg_sq)


@pytest.mark.parametrize(
    "options",
    [{"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True}, {"maximize": True}],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_option_chooses_torchs_own_loop(kind: Kind, options: dict[str, Any]) -> None:
    ours, plain = parameters(), parameters()
    made = stepped(zs.optim.fast_on_cpus(kind(ours, lr=0.1, **options)), ours)
    wanted = stepped(kind(plain, lr=0.1, **options), plain)
    assert all(map(torch.equal, made, wanted))


def test_torchs_own_loop_differs_in_last_places() -> None:
    ours, plain = parameters(), parameters()
    made = stepped(zs.optim.fast_on_cpus(torch.optim.AdamW(ours, lr=0.1)), ours, 20)
    wanted = stepped(torch.optim.AdamW(plain, lr=0.1, foreach=False), plain, 20)
    assert not all(map(torch.equal, made, wanted))
    torch.testing.assert_close(made, wanted, rtol=1e-6, atol=1e-6)
    with as_on_devices():
        again = parameters()
        assert all(
            map(torch.equal, stepped(zs.optim.fast_on_cpus(torch.optim.AdamW(again, lr=0.1)), again, 20), wanted)
        )


def test_an_option_that_is_set_later_counts_from_then_on() -> None:
    ours, plain = parameters(), parameters()
    optimizer, reference = zs.optim.fast_on_cpus(torch.optim.Adam(ours)), zs.optim.fast_on_cpus(torch.optim.Adam(plain))
    stepped(optimizer, ours)
    stepped(reference, plain)
    own = torch.optim.Adam(plain)
    own.load_state_dict(copy.deepcopy(reference.state_dict()))
    for each in (optimizer, own):
        each.param_groups[0]["maximize"] = True
    assert all(map(torch.equal, stepped(optimizer, ours), stepped(own, plain)))


@pytest.mark.parametrize("change", ["double", "bf16", "strided"])
def test_what_the_kernel_does_not_take_is_torchs(change: str) -> None:
    def made() -> list[torch.nn.Parameter]:
        dtype = {"double": torch.float64, "bf16": torch.bfloat16}.get(change, torch.float32)
        values = torch.ones(8, 6, dtype=dtype)
        return [torch.nn.Parameter(values.t() if change == "strided" else values)]

    ours, plain = made(), made()
    optimizer = zs.optim.fast_on_cpus(torch.optim.AdamW(ours, lr=0.1))
    wanted = stepped(torch.optim.AdamW(plain, lr=0.1, foreach=False), plain)
    assert all(map(torch.equal, stepped(optimizer, ours), wanted))


@pytest.mark.parametrize("offload", [{}, {"offload": "optimizer"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_has_it(kind: Kind, offload: dict[str, Any]) -> None:
    """Before its first step, in which the hook of the tests would bring it; and offloaded it has the same bits."""
    torch.manual_seed(3)
    model, inputs = torch.nn.Linear(6, 3), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    engine = zs.Engine(model, kind(model.parameters(), lr=0.1, weight_decay=0.1), zs.Plan(**offload))
    assert "_init_group" in vars(engine.optimizer)
    states = [HostStates(p.detach().view(-1), *torch.zeros(2, p.numel())) for p in plain.parameters()]
    for step in range(1, 5):
        engine.backward(engine(inputs).square().mean())
        engine.step()
        plain.zero_grad()
        plain(inputs).square().mean().backward()
        scalars = Scalars.of(engine.optimizer.param_groups[0], step, kind is torch.optim.AdamW)
        for parameter, each in zip(plain.parameters(), states, strict=True):
            adam_update(parameter.grad.view(-1), 1.0, scalars, each, each)
    assert all(torch.equal(plain.state_dict()[key], value) for key, value in engine.state_dict().items())


def test_of_one_group_the_kernel_takes_what_it_can() -> None:
    def made(dtypes: list[torch.dtype]) -> list[Any]:
        return [torch.nn.Parameter(torch.ones(40, dtype=dtype)) for dtype in dtypes]

    mixed = made([torch.float64, torch.float32])
    found = stepped(zs.optim.fast_on_cpus(torch.optim.AdamW(mixed, lr=0.1)), mixed, 20)
    plain = made([torch.float64, torch.float64])
    wanted = stepped(torch.optim.AdamW(plain, lr=0.1, foreach=False), plain, 20)
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=0.1, atol=0.1)


def test_an_optimizer_ends_with_its_last_reference() -> None:
    """Not only when rings are collected, or a rehearsal would count its states for longer."""
    members = parameters()
    optimizer = zs.optim.fast_on_cpus(torch.optim.AdamW(members))
    stepped(optimizer, members)
    seen = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert seen() is None
    finally:
        gc.enable()


def test_another_class_is_left_as_it_is() -> None:
    class Mine(torch.optim.AdamW):
        pass

    for make in (Mine, torch.optim.NAdam):
        optimizer = make(parameters())
        assert zs.optim.fast_on_cpus(optimizer) is optimizer
        assert "_init_group" not in vars(optimizer)


def test_a_backward_over_values_that_an_update_changed_is_refused() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = zs.optim.fast_on_cpus(torch.optim.AdamW([weight]))
    inputs = torch.randn(4, 4, requires_grad=True)
    loss = (inputs @ weight).sum()
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
