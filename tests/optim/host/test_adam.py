"""The host Adam against its equations in numpy, operation by operation, and against torch.optim, in every layout."""

import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zeroshard.errors import OptimizerError
from zeroshard.kernels import build
from zeroshard.optim.host import adam as host_adam
from zeroshard.optim.host import tiled
from zeroshard.optim.host.adam import adam_update, backend, using
from zeroshard.optim.host.states import Blockwise, HostStates, Scalars, StateSplit, map_on, stands_for

GROUP = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
EXACT = [pytest.param("c++", marks=pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")), "torch"]
Optimizer = Callable[..., torch.optim.Optimizer]


def bits(tensor: Tensor) -> Tensor:
    """The bits, but one NaN like another."""
    plain = torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor)
    return plain.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def fresh(n: int) -> HostStates:
    return HostStates(torch.zeros(n), torch.zeros(n), torch.zeros(n))


def random_states(n: int) -> HostStates:
    return HostStates(torch.randn(n), torch.randn(n), torch.rand(n))


def gradients(n: int, dtype: torch.dtype, late: bool) -> Tensor:
    """Of all magnitudes, with zeros and denormals; when `late`, squares that overflow too."""
    info = torch.finfo(dtype)
    values = torch.randn(n) * 10 ** torch.empty(n).uniform_(-10, 4)
    values[::7] = 0.0
    values[1::11] *= 1e-38
    values[2::13] = info.tiny / 4
    if late:
        values[3::101] = info.max / 2
    return values.clamp(info.min, info.max).to(dtype)


def literal(
    gradient: Tensor, factor: float, group: dict[str, Any], step: int, states: tuple[Any, Any, Any]
) -> tuple[Any, Any, Any]:
    """One step by numpy on fp32 (parameters, exp_avg, exp_avg_sq), each operation rounded by itself."""
    f32 = np.float32
    lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
    root = (1 - beta2**step) ** 0.5
    with np.errstate(all="ignore"):
        p, m, v = states
        g = gradient.float().numpy() * f32(factor)
        if not group["decoupled_weight_decay"]:
            g = g + p * f32(decay)
        m = m + (g - m) * f32(1 - beta1) if beta1 >= 0.5 else g + (m - g) * f32(beta1)
        v = v * f32(beta2) + g * f32(1 - beta2) * g
        kept = p * f32(1 - lr * decay) if group["decoupled_weight_decay"] else p
        size = m * f32(lr * root / (1 - beta1**step))
        return kept - size / (np.sqrt(v) + f32(group["eps"] * root)), m, v


def follow(make: Optimizer, n: int, steps: int, dtype: torch.dtype, out_dtype: torch.dtype = torch.bfloat16) -> None:
    """The update and its literal side by side; every step writes other buffers than it reads."""
    start = torch.randn(n)
    optimizer = make([torch.nn.Parameter(start.clone())])
    assert stands_for(optimizer) is None
    before, after, out = HostStates(start, torch.zeros(n), torch.zeros(n)), fresh(n), torch.empty(n, dtype=out_dtype)
    wanted = start.clone().numpy(), np.zeros(n, np.float32), np.zeros(n, np.float32)
    for step in range(1, steps + 1):
        gradient = gradients(n, dtype, late=step > steps // 2)
        group = optimizer.param_groups[0]
        group["lr"] = group["lr"] * 0.999
        adam_update(gradient, 0.37, Scalars.of(group, step, group["decoupled_weight_decay"]), before, after, out)
        before, after = after, before
        wanted = literal(gradient, 0.37, group, step, wanted)
        for made, values in zip((before.master, before.exp_avg, before.exp_avg_sq), wanted, strict=True):
            assert torch.equal(bits(made), bits(torch.from_numpy(values)))
            assert torch.equal(made.isnan(), torch.from_numpy(values).isnan())
        assert torch.equal(bits(out), bits(before.master.to(out_dtype)))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_hundreds_of_steps_are_the_equations_bit_for_bit(name: str, decay: float, kind: Optimizer) -> None:
    with using(name):
        follow(lambda p: kind(p, lr=1e-2, weight_decay=decay), 1003, 300, torch.bfloat16)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("step", [1, 2, 1000, 100_000, 10_000_000])
def test_late_steps_are_the_equations_bit_for_bit(name: str, step: int) -> None:
    """With denormals, zeros and huge values in the states too."""
    n, group = 1003, {**GROUP, "decoupled_weight_decay": True}
    sizes = 10.0 ** torch.empty(3, n).uniform_(-44, 38)
    sizes[:, ::5] = 0.0
    sizes[:2] *= torch.randn(2, n).sign()
    states, gradient = HostStates(*sizes.clone()), gradients(n, torch.float32, late=True)
    wanted = literal(gradient, 1.0, group, step, tuple(x.numpy() for x in sizes))
    with using(name):
        adam_update(gradient, 1.0, Scalars.of(group, step, decoupled=True), states, states)
    for made, values in zip((states.master, states.exp_avg, states.exp_avg_sq), wanted, strict=True):
        assert torch.equal(bits(made), bits(torch.from_numpy(values)))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.2, 0.9), (0.0, 0.99)])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_torchs_own_loop_is_within_some_last_places(name: str, betas: tuple[float, float], kind: Optimizer) -> None:
    n, steps = 1003, 100
    parameter = torch.nn.Parameter(torch.randn(n))
    optimizer = kind([parameter], lr=1e-3, betas=betas, weight_decay=0.1, foreach=False)
    states, group = HostStates(parameter.detach().clone(), torch.zeros(n), torch.zeros(n)), optimizer.param_groups[0]
    for step in range(1, steps + 1):
        parameter.grad = torch.randn(n) * 10 ** torch.empty(n).uniform_(-6, 2)
        scalars = Scalars.of(group, step, group["decoupled_weight_decay"])
        with using(name):
            adam_update(parameter.grad, 1.0, scalars, states, states)
        optimizer.step()
    torch.testing.assert_close(states.master, parameter.data, rtol=1e-6, atol=1e-6)
    for key, rtol in (("exp_avg", 1e-5), ("exp_avg_sq", 1e-5)):
        torch.testing.assert_close(getattr(states, key), optimizer.state[parameter][key], rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 31, 257, 600])
def test_no_length_and_no_gradient_dtype_is_different(name: str, dtype: torch.dtype, n: int) -> None:
    with using(name):
        follow(lambda p: torch.optim.AdamW(p, lr=1e-2), n, 20, dtype, torch.float16)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    "options",
    [
        {"lr": torch.tensor(1e-3)},
        {"lr": torch.tensor([1e-3])},
        {"betas": (0.5, 0.9)},
        {"betas": (0.2, 0.0)},
        {"betas": (0.0, 0.99)},
        {"eps": 0.0},
        {"lr": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_every_option_that_it_stands_for(name: str, options: dict[str, Any], kind: Optimizer) -> None:
    with using(name):
        follow(lambda p: kind(p, **{"lr": 1e-2, "weight_decay": 0.1, **options}), 320, 30, torch.bfloat16)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD"),
        (lambda p: type("Mine", (torch.optim.AdamW,), {})(p), "Mine"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.Adam(p, maximize=True), "maximize"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable"),
        (lambda p: torch.optim.Adam(p, capturable=True), "capturable"),
        (lambda p: torch.optim.AdamW(p, fused=True), "fused"),
        (lambda p: torch.optim.AdamW(p, foreach=True), "foreach=True"),
        (lambda p: torch.optim.AdamW(p, foreach=False), "foreach=False"),
        (lambda p: torch.optim.AdamW(p, betas=(torch.tensor(0.9), torch.tensor(0.99))), "betas"),
    ],
)
def test_what_it_does_not_stand_for_has_a_reason(make: Optimizer, reason: str) -> None:
    assert reason in str(stands_for(make([torch.nn.Parameter(torch.zeros(3))])))


@pytest.mark.parametrize("name", EXACT)
def test_in_place_equals_shadows_and_shadows_leave_what_they_read(name: str) -> None:
    n, scalars = 3000, Scalars.of(GROUP, 3, decoupled=True)
    before, after, gradient = random_states(n), fresh(n), torch.randn(n).bfloat16()
    kept = [getattr(before, field).clone() for field in HostStates.__slots__]
    with using(name):
        adam_update(gradient, 1.0, scalars, before, after)
        assert all(torch.equal(getattr(before, f), k) for f, k in zip(HostStates.__slots__, kept, strict=True))
        adam_update(gradient, 1.0, scalars, before, before)
    assert all(torch.equal(getattr(before, f), getattr(after, f)) for f in HostStates.__slots__)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("offset", [1, 3, 4, 8])
def test_any_alignment_and_nothing_beside_is_touched(name: str, offset: int) -> None:
    n, scalars = 1030, Scalars.of(GROUP, 3, decoupled=True)
    apart = random_states(n)
    wide = HostStates(*(torch.full((n + 20,), 7.0) for _ in range(3)))
    inside = wide.part(offset, offset + n)
    for field in HostStates.__slots__:
        getattr(inside, field).copy_(getattr(apart, field))
    gradient, out = torch.randn(n + 20).bfloat16(), torch.full((n + 20,), 7.0, dtype=torch.bfloat16)
    expected = torch.empty(n, dtype=torch.bfloat16)
    here = slice(offset, offset + n)
    with using(name):
        adam_update(gradient[here], 0.5, scalars, inside, inside, out[here])
        adam_update(gradient[here].clone(), 0.5, scalars, apart, apart, expected)
    assert torch.equal(out[here], expected)
    for whole, part in [(out, expected), *((getattr(wide, f), getattr(apart, f)) for f in HostStates.__slots__)]:
        assert torch.equal(whole[here], part)
        assert (whole[:offset] == 7).all()
        assert (whole[offset + n :] == 7).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", EXACT[:1])
def test_threads_change_nothing(name: str, threads: int) -> None:
    n, scalars = 150_001, Scalars.of(GROUP, 3, decoupled=True)
    states, gradient = random_states(n), torch.randn(n).half()
    results = [fresh(n) for _ in range(3)]
    with using("torch"):
        adam_update(gradient, 0.5, scalars, states, results[0])
    with using(name):  # two callers at once
        calls = [
            threading.Thread(target=adam_update, args=(gradient, 0.5, scalars, states, result, None, threads))
            for result in results[1:]
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
    for result in results[1:]:
        assert all(torch.equal(getattr(result, f), getattr(results[0], f)) for f in HostStates.__slots__)


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_denormals_are_flushed_by_all_threads_or_by_none() -> None:
    """Helpers that were made before the user asked for it too."""
    n, scalars, threads = 2_000_000, Scalars.of(GROUP, 3, decoupled=True), 4
    gradient = torch.zeros(n)
    states = HostStates(torch.zeros(n), torch.zeros(n), torch.empty(n))

    def kept(flush: bool) -> int:
        states.exp_avg_sq.fill_(1e-39)
        torch.set_flush_denormal(flush)
        try:
            adam_update(gradient, 1.0, scalars, states, states, threads=threads)
        finally:
            torch.set_flush_denormal(False)
        return int(states.exp_avg_sq.count_nonzero())

    with using("c++"):
        for flush, left in ((False, n), (True, 0), (False, n)):
            assert [kept(flush) for _ in range(6)] == [left] * 6


@pytest.mark.parametrize("name", EXACT)
def test_defaults_of_the_user_are_of_no_effect(name: str) -> None:
    states, gradient = HostStates(torch.ones(9), *moments_of("8 bit", 9)), torch.ones(9).half()
    map_on.cache_clear()
    with using(name), torch.device("meta"):
        adam_update(gradient, 1.0, Scalars.of(GROUP, 1, decoupled=True), states, states)
    assert states.master.isfinite().all()


@pytest.mark.parametrize("name", EXACT)
def test_nan_and_infinity_go_where_torch_lets_them(name: str) -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, -4.0] * 5))
    states, out = HostStates(parameter.detach().clone(), torch.zeros(20), torch.zeros(20)), torch.empty(20).half()
    gradient = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0] * 5)
    parameter.grad = gradient.clone()
    torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, foreach=False).step()
    with using(name):
        adam_update(gradient, 1.0, Scalars.of(GROUP, 1, decoupled=True), states, states, out)
    torch.testing.assert_close(states.master, parameter.data, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(out.isnan(), parameter.data.isnan())


def pattern_values() -> Tensor:
    """Every upper half of an fp32 with lower halves around the middle and the ends."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    values = (torch.arange(2**16)[:, None] << 16) + low
    return (values - (values >= 2**31) * 2**32).int().flatten().view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXACT)
def test_out_is_rounded_as_torch_rounds(name: str, dtype: torch.dtype) -> None:
    values = pattern_values()
    states, out = (
        HostStates(values, torch.zeros_like(values), torch.zeros_like(values)),
        torch.empty_like(values).to(dtype),
    )
    still = Scalars.of({**GROUP, "lr": 0.0}, 1, decoupled=True)
    with using(name):
        adam_update(torch.zeros_like(out), 1.0, still, states, fresh(values.numel()), out)
    assert torch.equal(bits(out), bits(values.to(dtype)))
    assert torch.equal(out.isnan(), values.isnan())


def test_a_split_master_is_exact_and_its_upper_half_rounded_but_for_ties() -> None:
    values = pattern_values()
    split = StateSplit.of(values)
    numbers = ~values.isnan()
    assert torch.equal(bits(split.values()), bits(values))
    assert torch.equal(split.values().isnan(), values.isnan())
    assert torch.equal(split.hi.isnan(), values.isnan())
    ties = values.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(split.hi[numbers & ~ties], values[numbers & ~ties].bfloat16())
    assert (split.hi[numbers & ties].float().abs() >= values[numbers & ties].abs()).all()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_split_master_follows_the_whole_one_bit_for_bit(name: str, decoupled: bool) -> None:
    n = 2000
    start = torch.randn(n)
    whole, split = (
        HostStates(start, *(torch.zeros(n) for _ in range(2))),
        HostStates(StateSplit.of(start), *(torch.zeros(2, n))),
    )
    after = HostStates(StateSplit.of(torch.zeros(n)), *(torch.zeros(2, n)))
    with using(name):
        for step in range(1, 100):
            gradient, scalars = torch.randn(n).bfloat16(), Scalars.of(GROUP, step, decoupled)
            adam_update(gradient, 1.0, scalars, whole, whole)
            adam_update(gradient, 1.0, scalars, split, after)
            split, after = after, split
    assert isinstance(split.master, StateSplit)
    assert torch.equal(split.master.values(), whole.master)


LAYOUTS = ["bf16", "8 bit", "mixed"]


def moments_of(layout: str, n: int) -> tuple[Any, Any]:
    m, v = torch.randn(n) * 10 ** torch.empty(n).uniform_(-6, 0), torch.rand(n) * 10 ** torch.empty(n).uniform_(-9, 0)
    m[:300], v[:300] = 0.0, 0.0
    if layout == "bf16":
        return m.bfloat16(), v.bfloat16()
    return (m.bfloat16() if layout == "mixed" else Blockwise.encode(m, True)), Blockwise.encode(v, False)


def parts_of(moment: Any) -> list[Tensor]:
    return [moment.codes, moment.scales] if isinstance(moment, Blockwise) else [moment]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("layout", ["fp32", *LAYOUTS])
def test_new_weights_alone_are_those_of_the_update_and_states_stay(name: str, layout: str) -> None:
    n, scalars = 3000, Scalars.of(GROUP, 3, decoupled=True)
    states = random_states(n) if layout == "fp32" else HostStates(torch.randn(n), *moments_of(layout, n))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        gradient, alone = torch.randn(n).to(dtype), torch.empty(n, dtype=dtype)
        kept = [part.clone() for field in HostStates.__slots__ for part in parts_of(getattr(states, field))]
        with using(name):
            adam_update(gradient, 0.5, scalars, states, None, alone)
            now = [part for field in HostStates.__slots__ for part in parts_of(getattr(states, field))]
            assert all(torch.equal(before, after) for before, after in zip(kept, now, strict=True))
            adam_update(gradient, 0.5, scalars, states, states)
        assert torch.equal(alone, states.master.to(dtype))
    with pytest.raises(OptimizerError, match="writes nothing"):
        adam_update(gradient, 0.5, scalars, states, None)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_moments_are_the_fp32_update_and_then_rounded(name: str, layout: str) -> None:
    n, scalars = 1100, Scalars.of(GROUP, 5, decoupled=True)
    small = HostStates(torch.randn(n), *moments_of(layout, n))
    wide = [m.decode() if isinstance(m, Blockwise) else m.float() for m in (small.exp_avg, small.exp_avg_sq)]
    exact, gradient = HostStates(small.master.clone(), *wide), torch.randn(n).bfloat16()
    gradient[:290] = 0.0
    with using("torch"):
        adam_update(gradient, 1.0, scalars, exact, exact)
    with using(name):
        adam_update(gradient, 1.0, scalars, small, small)
    assert torch.equal(small.master, exact.master)
    for moment, values, signed in ((small.exp_avg, exact.exp_avg, True), (small.exp_avg_sq, exact.exp_avg_sq, False)):
        made = Blockwise.encode(values, signed) if isinstance(moment, Blockwise) else values.bfloat16()
        for got, wanted in zip(parts_of(moment), parts_of(made), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", EXACT)
def test_square_roots_are_correctly_rounded(name: str) -> None:
    n, scalars = 4000, Scalars.of({**GROUP, "lr": 1.0, "weight_decay": 0.0, "eps": 0.0}, 10**9, decoupled=True)
    states, gradient = HostStates(torch.zeros(n), torch.ones(n), torch.rand(n)), torch.ones(n)
    with using(name):
        adam_update(gradient, 1.0, scalars, states, states)
    roots = states.exp_avg_sq.double().sqrt().float()
    assert torch.equal(states.master, -states.exp_avg / roots)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"gradient": torch.zeros(9)}, "9 elements"),
        ({"gradient": torch.zeros(10, dtype=torch.int32)}, "int32"),
        ({"gradient": torch.zeros(20)[::2]}, "not contiguous"),
        ({"out": torch.zeros(10)}, "bfloat16 or torch.float16"),
        ({"before": HostStates(torch.zeros(10).half(), torch.zeros(10), torch.zeros(10))}, "master"),
        ({"before": HostStates(torch.zeros(10), torch.zeros(10).bfloat16(), torch.zeros(10))}, "layout"),
        ({"after": HostStates(torch.zeros(10), torch.zeros(10), torch.zeros(10, device="meta"))}, "meta"),
        ({"after": HostStates(torch.zeros(10), Blockwise.zeros(10, False), torch.zeros(10))}, "signed=True"),
        ({"after": HostStates(torch.zeros(10), Blockwise.zeros(300, True), torch.zeros(10))}, "codes"),
    ],
)
def test_wrong_tensors_are_refused(change: dict[str, Any], words: str) -> None:
    right: dict[str, Any] = {"gradient": torch.zeros(10), "before": fresh(10), "after": fresh(10)}
    with pytest.raises(OptimizerError, match=words):
        adam_update(**{**right, **change}, factor=1.0, scalars=Scalars.of(GROUP, 1, decoupled=True))


def test_out_of_a_split_master_is_refused_and_nothing_is_an_update_of_nothing() -> None:
    split, scalars = (
        HostStates(StateSplit.of(torch.zeros(4)), torch.zeros(4), torch.zeros(4)),
        Scalars.of(GROUP, 1, True),
    )
    with pytest.raises(OptimizerError, match="split master"):
        adam_update(torch.zeros(4), 1.0, scalars, split, split, torch.zeros(4).half())
    adam_update(torch.zeros(0), 1.0, scalars, fresh(0), fresh(0))


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As in a process that has built nothing and starts with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (host_adam.library, host_adam._first):
        cached.cache_clear()
    yield tmp_path
    for cached in (host_adam.library, host_adam._first):
        cached.cache_clear()


def test_without_a_compiler_torch_does_it_and_one_warning_says_so(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.warns(UserWarning, match=r"torch's operations.*No C\+\+ compiler") as caught:
        assert backend() == "torch"
    assert len(caught) == 1
    assert backend() == "torch"
    assert not list(unbuilt.iterdir())


def test_where_our_source_does_not_build_torch_does_it(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++;")
    monkeypatch.setattr(host_adam, "SOURCE", broken)
    with pytest.warns(UserWarning, match=r"torch's operations.*could not build"):
        assert backend() == "torch"


def test_a_kernel_that_differs_from_torch_is_not_used(monkeypatch: pytest.MonkeyPatch, unbuilt: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.undo()  # the kernel itself comes from the cache
    true = tiled.update
    with monkeypatch.context() as patch:
        patch.setattr(tiled, "update", lambda g, factor, *rest: true(g, factor * 1.0000001, *rest))
        with pytest.warns(UserWarning, match=r"torch's operations.*bit for bit"):
            assert backend() == "torch"


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_it_is_built_once_into_the_cache(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_adam, "FLAGS", tuple(flag.replace("-O3", "-O0") for flag in host_adam.FLAGS))
    assert backend() == "c++"
    (built,) = (unbuilt / "zeroshard").glob("*.so")
    host_adam._first.cache_clear()
    host_adam.library.cache_clear()
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    assert backend() == "c++"
    assert built.exists()


@pytest.mark.skipif(build.compiler() is None or platform.machine() != "x86_64", reason="no C++ compiler for x86")
def test_the_bits_are_those_of_the_plainest_processor(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_adam, "FLAGS", tuple(flag.replace("-O3", "-O1") for flag in host_adam.FLAGS))
    monkeypatch.setattr(build, "NATIVE", ("-march=x86-64",))
    with using("c++"):
        follow(lambda p: torch.optim.AdamW(p, lr=1e-2), 1003, 20, torch.float16, torch.float16)
