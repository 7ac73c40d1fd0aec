"""`overlap_gather`: weights that arrive beside the next forward, against an engine that waits at the end of each step.

`twins` makes both engines from the same model. Reads, writes and calls between `step` and the next forward must see the
same in both, bit for bit, while the weights were still on their way in the one that overlaps.
"""

import contextlib
import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import late_updates_of, parts_of
from jobs import error_of
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm import collectives as comm
from zeroshard.errors import CommError, PlanError
from zeroshard.parts.weights import Residence

WIDTH, ROWS = 8, 3
SETTINGS = [(1, "fp32"), (2, "fp32"), (2, "bf16")]
EVENTS: list[str] = []  # what the traced worker did


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            EVENTS.append(f"block {number}")
            x = block(x)
            if self.fails:
                raise ValueError("in the midst of a forward")
        return x.float().square().mean()


def make(mesh: zs.Mesh, **options: Any) -> zs.Engine:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"zero": 2, "transport": "network", **options}
    return zs.Engine(Net(), lambda ps: torch.optim.AdamW(ps, lr=1e-2), zs.Plan.from_dict(settings), mesh=mesh)


def twins(mesh: zs.Mesh, **options: Any) -> tuple[zs.Engine, zs.Engine]:
    """One that overlaps, and one that waits."""
    return make(mesh, overlap_gather=True, **options), make(mesh, **options)


def rows(mesh: zs.Mesh, step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + mesh.rank))


def train(engine: zs.Engine, step: int) -> Tensor:
    """One step; its loss."""
    loss: Tensor = engine(rows(engine.mesh, step))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def residences(engine: zs.Engine) -> set[Residence]:
    return {part.weights.residence for part in parts_of(engine).all}


def arriving(engine: zs.Engine) -> bool:
    return residences(engine) == {Residence.ARRIVING}


def values(engine: zs.Engine) -> list[Tensor]:
    return list(engine.state_dict().values())


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and same(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def losses_and_weights(mesh: zs.Mesh, zero: int, precision: str) -> list[Any]:
    found = []
    for engine in twins(mesh, zero=zero, precision=precision, clip_norm=0.1):
        pending, losses = [], []
        for step in range(4):
            losses.append(train(engine, step))
            pending.append(arriving(engine))
        found.append([losses, values(engine), _traffic(engine), pending])
    return found


@pytest.mark.parametrize(("zero", "precision"), SETTINGS)
def test_losses_weights_and_traffic_are_those_of_waiting(pool: Pool, zero: int, precision: str) -> None:
    for overlapped, waited in pool.run(losses_and_weights, 2, zero, precision):
        assert same(overlapped[:3], waited[:3])
        assert (overlapped[3], waited[3]) == ([True] * 4, [False] * 4)
        assert all(planned in (None, measured) for _, planned, measured in overlapped[2])


@contextlib.contextmanager
def traced() -> Iterator[list[str]]:
    """The gathers that are started and waited for, by name."""
    start, wait = comm.Comm.gather, comm.Pending.wait

    def gather(
        self: Any, full: Tensor, own: Tensor, purpose: Any, label: str, padding: int = 0, bounds: Any = None
    ) -> comm.Pending:
        EVENTS.append(f"start {label}")
        return start(self, full, own, purpose, label, padding, bounds)

    def waits(self: comm.Pending) -> None:
        if "updated" in self._place.label and self._work is not None:
            EVENTS.append(f"wait {self._place.label.partition(' of ')[2]}")
        wait(self)

    EVENTS.clear()
    comm.Comm.gather, comm.Pending.wait = gather, waits  # type: ignore[method-assign]
    try:
        yield EVENTS
    finally:
        comm.Comm.gather, comm.Pending.wait = start, wait  # type: ignore[method-assign]


def events_of_a_step(mesh: zs.Mesh) -> tuple[list[str], list[str], list[str]]:
    engine = make(mesh, overlap_gather=True)
    train(engine, 0)
    loss = engine(rows(mesh, 1))
    engine.backward(loss)
    with traced() as events:
        engine.step()
        step = list(events)
        events.clear()
        engine(rows(mesh, 2))
        forward = list(events)
    return [unit.label for unit in parts_of(engine).units], step, forward


def test_a_step_ends_before_its_gathers_and_each_unit_waits_for_its_own(pool: Pool) -> None:
    for units, step, forward in pool.run(events_of_a_step, 2):
        *blocks, root = [f"updated {unit}[float32]" for unit in units]
        assert step == [f"start {label}" for label in (root, *blocks)]
        expected = [f"wait {root}"]
        for number, label in enumerate(blocks):
            expected += [f"block {number}", f"wait {label}"]
        assert forward == expected


READS: dict[str, Callable[[Net], Any]] = {
    "operation": lambda m: m.first.weight + 1,
    "data": lambda m: m.first.weight.data.clone(),
    "detach": lambda m: m.first.weight.detach().clone(),
    "numpy": lambda m: m.first.weight.detach().numpy().tolist(),
    "numpy of the parameter": lambda m: _without_gradients(lambda: m.first.weight.numpy(force=True).tolist()),
    "tolist": lambda m: m.first.weight.tolist(),
    "item": lambda m: m.first.weight[0, 0].item(),
    "indexed": lambda m: m.blocks[1].up.weight[2:4].clone(),
    "transposed": lambda m: m.blocks[1].up.weight.T.clone(),
    "repr": lambda m: repr(m.blocks[2].norm.weight),
    "pointer": lambda m: _read_at(m.blocks[0].up.bias),
    "storage": lambda m: m.first.bias.untyped_storage().tolist()[:8] and m.first.bias.tolist(),
    "stride": lambda m: (m.first.weight.stride(), m.first.weight.is_contiguous()),
    "dlpack": lambda m: torch.from_dlpack(m.first.weight.detach()).clone(),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).detach().clone(),
    "foreach": lambda m: _without_gradients(lambda: torch._foreach_add(list(m.parameters()), 1.0)),
    "average": lambda m: _moving_average(m),
    "stack": lambda m: torch.stack([m.blocks[0].norm.weight, m.blocks[1].norm.weight]),
    "norm": lambda m: nn.utils.get_total_norm(list(m.parameters())),
    "operator": lambda m: torch.ops.aten.mul.Tensor(m.first.weight, 2),
    "compiled": lambda m: torch.compile(lambda: m.first.weight * 2, backend="eager")(),
    "state_dict": lambda m: {k: v.clone() for k, v in m.state_dict().items()},
    "state_dict of a block": lambda m: {k: v.clone() for k, v in m.blocks[1].state_dict().items()},
    "deepcopy": lambda m: {k: v.clone() for k, v in copy.deepcopy(m).state_dict().items()},
    "deepcopy of a parameter": lambda m: copy.deepcopy(m.first.weight).detach(),
    "pickle": lambda m: pickle.loads(pickle.dumps(m.first.weight)).detach(),
    "torch.save": lambda m: _saved(m.blocks[0].up.weight),
    "functional_call": lambda m: torch.func.functional_call(
        nn.Linear(WIDTH, WIDTH), dict(m.first.named_parameters()), torch.ones(1, WIDTH)
    ),
    "clone by to": lambda m: m.first.weight.to(torch.float64),
    "module called by itself": lambda m: m.blocks[1](torch.ones(1, WIDTH)),
    "part of a unit called by itself": lambda m: m.blocks[1].up(torch.ones(1, WIDTH)),
}


def _without_gradients(call: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return call()


def _read_at(parameter: Tensor) -> list[float]:
    import ctypes

    return list((ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr()))


@torch.no_grad()
def _moving_average(model: nn.Module) -> list[Tensor]:
    averages = [torch.zeros_like(p) for p in model.parameters()]
    for average, parameter in zip(averages, model.parameters(), strict=True):
        average.lerp_(parameter, 0.5)
    return averages


def _saved(parameter: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)
    return loaded.detach()


def reads_between_steps(mesh: zs.Mesh) -> list[tuple[str, bool, bool]]:
    overlapped, waited = twins(mesh)
    found = []
    for step, (name, read) in enumerate(READS.items()):
        train(overlapped, step)
        train(waited, step)
        pending = arriving(overlapped)
        found.append((name, pending, same(read(overlapped.model), read(waited.model))))  # type: ignore[arg-type]
    return found


def test_reads_between_step_and_forward_see_new_values(pool: Pool) -> None:
    for found in pool.run(reads_between_steps, 2):
        assert [name for name, pending, _ in found if not pending] == []
        assert [name for name, _, equal in found if not equal] == []


UNSEEN: dict[str, Callable[[nn.Parameter], Tensor]] = {  # never ask Python, so nothing can let them wait
    "torch.tensor": lambda p: torch.tensor(p),
    "as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "torch.func": lambda p: torch.func.grad(lambda x: x.square().sum())(p),
    "without overrides": lambda p: _without_overrides(lambda: p * 2),
}


def _without_overrides(call: Callable[[], Tensor]) -> Tensor:
    with torch._C.DisableTorchFunction():
        return call()


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def unseen_reads(mesh: zs.Mesh) -> list[list[bool]]:
    engine = make(mesh, overlap_gather=True)
    traced_by_jit = torch.jit.trace(engine.model.first, torch.ones(1, WIDTH), check_trace=False)
    reads = {**UNSEEN, "traced": lambda p: traced_by_jit(torch.ones(1, WIDTH))}
    found = []
    for step, read in enumerate(reads.values()):
        train(engine, step)
        pending = arriving(engine)
        before = bool(read(engine.model.first.weight).isnan().all())
        engine.flush()
        found.append([pending, before, not bool(read(engine.model.first.weight).isnan().any())])
    return found


def test_what_cannot_wait_reads_nan_and_never_old_values(pool: Pool) -> None:
    for found in pool.run(unseen_reads, 2):
        assert found == [[True, True, True]] * (len(UNSEEN) + 1)


ALIASES: dict[str, Callable[[Net], Any]] = {
    "detached": lambda m: m.first.weight.detach(),
    "data": lambda m: m.first.weight.data,
    "view": lambda m: m.first.weight[1],
    "array": lambda m: m.first.weight.detach().numpy(),
    "state_dict": lambda m: m.first.state_dict(),
}


def held_aliases(mesh: zs.Mesh, precision: str) -> list[list[bool]]:
    overlapped, waited = twins(mesh, precision=precision)
    dtype = overlapped.model.first.weight.dtype
    found = []
    for step, (name, alias) in enumerate(ALIASES.items()):
        if name == "array" and dtype == torch.bfloat16:
            continue
        mine, other = alias(overlapped.model), alias(waited.model)  # type: ignore[arg-type]
        train(overlapped, step)
        train(waited, step)
        now = {part.flat.unit.label: part.weights.residence for part in parts_of(overlapped).all}
        root = parts_of(overlapped).units[-1].label
        others = {residence for unit, residence in now.items() if unit != root}
        equal = bool((mine == other).all()) if name == "array" else same(mine, other)
        found.append([now[root] is Residence.GATHERED, others == {Residence.ARRIVING}, equal])
        del mine, other
        train(overlapped, step)
        train(waited, step)
        found[-1].append(arriving(overlapped))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_flat_that_the_user_has_a_tensor_of_is_waited_for(pool: Pool, precision: str) -> None:
    for found in pool.run(held_aliases, 2, precision):
        assert found == [[True] * 4] * len(found)


def _set_data(engine: zs.Engine) -> None:
    engine.model.first.weight.data = torch.full((WIDTH, WIDTH), 0.25)  # type: ignore[union-attr]


@torch.no_grad()
def _add(engine: zs.Engine) -> None:
    for parameter in engine.model.parameters():
        parameter.add_(1)


def _load(engine: zs.Engine) -> None:
    engine.model.load_state_dict({k: v * 0.5 for k, v in engine.model.state_dict().items()})


def _gathered(engine: zs.Engine) -> None:
    with engine.gathered(), torch.no_grad():
        engine.model.blocks[1].up.weight.mul_(2)  # type: ignore[index, union-attr]


def _fill(engine: zs.Engine) -> None:
    nn.init.ones_(engine.model.blocks[0].norm.weight)  # type: ignore[index, union-attr, arg-type]


WRITES: dict[str, Callable[[zs.Engine], None]] = {
    "data": _set_data,
    "in place": _add,
    "load_state_dict": _load,
    "gathered": _gathered,
    "initialised": _fill,
}


def writes_between_steps(mesh: zs.Mesh) -> list[tuple[bool, bool]]:
    found = []
    for write in WRITES.values():
        engines = twins(mesh)
        pending, weights = [], []
        for engine in engines:
            train(engine, 0)
            pending.append(arriving(engine))
            write(engine)
            train(engine, 1)
            weights.append(values(engine))
        found.append((pending[0], same(*weights)))
    return found


def test_writes_between_step_and_forward_last(pool: Pool) -> None:
    for found in pool.run(writes_between_steps, 2):
        assert found == [(True, True)] * len(WRITES)


def _evaluated(engine: zs.Engine, folder: Path) -> Any:
    with torch.no_grad():
        return engine(rows(engine.mesh, 7))


def _after_an_error(engine: zs.Engine, folder: Path) -> Any:
    engine.model.fails = True
    word = error_of(lambda: engine(rows(engine.mesh, 7)))
    engine.model.fails = False
    return word, engine.model.blocks[2].up.weight.tolist()  # type: ignore[index, union-attr]


def _saved_and_loaded(engine: zs.Engine, folder: Path) -> Any:
    engine.save(folder / str(engine.plan.overlap_gather), wait=True)
    train(engine, 7)
    engine.load(folder / str(engine.plan.overlap_gather))
    return [p.tolist() for p in engine.model.parameters()]


def _replicas(engine: zs.Engine, folder: Path) -> Any:
    engine.check_replicas()
    return residences(engine) == {Residence.GATHERED}


def _forwards_first(engine: zs.Engine, folder: Path) -> Any:
    """Several forwards before their backwards."""
    for first in (3, 6):
        for loss in [engine(rows(engine.mesh, step)) for step in range(first, first + 3)]:
            engine.backward(loss)
        engine.step()
    return values(engine)


def _compiled(engine: zs.Engine, folder: Path) -> Any:
    compiled, losses = torch.compile(engine.model, backend="eager"), []
    for step in range(3):
        losses.append(compiled(rows(engine.mesh, step)))
        engine.backward(losses[-1])
        engine.step()
    return [loss.detach() for loss in losses], values(engine)


CALLS: list[Callable[[zs.Engine, Path], Any]] = [
    _evaluated, _after_an_error, _saved_and_loaded, _replicas, _forwards_first, _compiled,
]  # fmt: skip


def calls_between_steps(mesh: zs.Mesh, folder: Path) -> list[tuple[str, bool, bool]]:
    found = []
    for call in CALLS:
        engines = twins(mesh)
        pending, results = [], []
        for engine in engines:
            train(engine, 0)
            pending.append(arriving(engine))
            results.append([call(engine, folder / call.__name__), train(engine, 1), values(engine)])
        found.append((call.__name__, pending[0], same(*results)))
    return found


def test_calls_between_step_and_forward_see_new_values(pool: Pool, tmp_path: Path) -> None:
    for call in CALLS:
        (tmp_path / call.__name__).mkdir()
    for found in pool.run(calls_between_steps, 2, tmp_path):
        assert found == [(call.__name__, True, True) for call in CALLS]


def parameters_that_outlive_the_engine(mesh: zs.Mesh) -> tuple[bool, bool, bool]:
    overlapped, waited = twins(mesh)
    train(overlapped, 0)
    train(waited, 0)
    pending = arriving(overlapped)
    model, others = overlapped.model, [p.detach().clone() for p in waited.model.parameters()]
    left = list(model.parameters())
    del overlapped
    gc.collect()
    one = torch.equal(next(model.parameters()), others[0])
    del model
    gc.collect()
    return pending, one, all(map(torch.equal, left, others))


def test_weights_arrive_where_the_engine_is_gone(pool: Pool) -> None:
    assert pool.run(parameters_that_outlive_the_engine, 2) == [(True, True, True)] * 2


def a_gather_that_fails(mesh: zs.Mesh) -> tuple[list[str], bool]:
    engine = make(mesh, overlap_gather=True)
    train(engine, 0)
    weight, wait = engine.model.first.weight, comm.Pending.wait

    def broken(self: comm.Pending) -> None:
        raise CommError("a connection broke")

    comm.Pending.wait = broken  # type: ignore[method-assign]
    try:
        words = [error_of(lambda: weight + 1), error_of(lambda: weight.data), error_of(lambda: engine(rows(mesh, 1)))]
    finally:
        comm.Pending.wait = wait  # type: ignore[method-assign]
    return words, bool(torch.isfinite(weight).all())


def test_weights_whose_gather_failed_cannot_be_read(pool: Pool) -> None:
    for words, finite in pool.run(a_gather_that_fails, 2):
        assert words == ["CommError: a connection broke"] * 3
        assert finite


def counts_of_a_forward(mesh: zs.Mesh) -> tuple[int, int, float]:
    engine = make(mesh, overlap_gather=True)
    train(engine, 0)
    engine(rows(mesh, 1))
    count = engine.comm.counts[comm.Purpose.GATHER_PARAMETERS]
    return count.calls, count.elements, count.seconds


def test_bytes_belong_to_the_step_that_started_them_and_seconds_to_the_one_that_waits(pool: Pool) -> None:
    for calls, elements, seconds in pool.run(counts_of_a_forward, 2):
        assert (calls, elements) == (0, 0)
        assert seconds > 0


def nothing_to_wait_for(mesh: zs.Mesh) -> tuple[bool, list[int]]:
    engine = make(mesh, overlap_gather=True)
    train(engine, 0)
    return residences(engine) == {Residence.GATHERED}, list(late_updates_of(engine).awaited(range(3)))


def test_one_rank_has_nothing_to_wait_for(pool: Pool) -> None:
    assert pool.run(nothing_to_wait_for, 1) == [(True, [])]


@pytest.mark.parametrize(
    "other",
    [
        *({"zero": 0}, {"zero": 3}, {"transport": "shared"}, {"pipeline_parallel": 2, "microbatches": 2}),
        *({"offload": "optimizer"}, {"offload": "activations"}),
    ],
)
def test_what_does_not_combine_is_refused(other: dict[str, Any]) -> None:
    name = next(iter(other))
    with pytest.raises(PlanError, match=rf"overlap_gather=True and {name}=.* do not combine"):
        zs.Plan.from_dict({"overlap_gather": True, **other})


def test_it_is_a_yes_or_a_no() -> None:
    with pytest.raises(PlanError, match="overlap_gather is 1"):
        zs.Plan(overlap_gather=1)  # type: ignore[arg-type]


def _traffic(engine: zs.Engine) -> list[tuple[str, int | None, int]]:
    return [(row.purpose, row.planned_elements, row.measured_elements) for row in engine.traffic()]
