"""Every byte and every element on the wire: ledger and comm against the paper's formulas and an independent count."""

from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.models import batch, build
from engine.plain import transport_of
from inside import gradient_tensors_of, optimizer_of, parts_of
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import BudgetExceeded
from zeroshard.memory.ledger import Category

STAGES = (0, 1, 2, 3)
STATES = ("parameters", "gradients", "master weights", "optimizer states")
BYTES = {"adamw": 8, "sgd": 0, "momentum": 4, "adagrad": 4, "amsgrad": 12}  # of state per parameter, in fp32
MAKERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-3),
    "amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
}


class Even(nn.Module):
    """Parameters in multiples of 4 per unit, so that 2 and 4 ranks need no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().square().mean()


class TwoOutputs(nn.Module):
    """Returns the loss and a hidden state in a dict; its root owns a parameter directly."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(13, 8))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(3)])

    def forward(self, tokens: Tensor, step: int = 0) -> dict[str, Tensor]:
        hidden = x = self.blocks[0](self.table[tokens])
        for block in self.blocks[1:]:
            x = x + block(x)
        return {"loss": x.float().square().mean() + hidden.float().square().mean(), "hidden": hidden}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    kinds: dict[str, Any] = {"Even": Even, "TwoOutputs": TwoOutputs}
    return kinds[name]() if name in kinds else build(name)


def counted(engine: zs.Engine) -> dict[str, int]:
    """Bytes of the distinct storages that hold parameters, masters, states and gradients, found without the ledger."""
    seen: set[int] = set()

    def size(tensors: list[Tensor | None]) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
        new = {key: nbytes for key, nbytes in storages.items() if key not in seen and nbytes}
        seen.update(new)
        return sum(new.values())

    parts = parts_of(engine).all
    parameters = size([t for s in parts for t in (s.weights.own, s.weights.full)])
    parameters += 0 if engine.plan.zero == 3 else size([p.data for p in engine.model.parameters()])
    spans = optimizer_of(engine)
    masters = size([span.tensor for span in spans.every])
    states = size(
        [v for state in spans.held.states.values() for v in state.values() if isinstance(v, Tensor) and v.dim()]
    )
    gradients = size(gradient_tensors_of(engine))
    return dict(zip(STATES, (parameters, gradients, masters, states), strict=True))


def measure(mesh: zs.Mesh, name: str, plan: dict[str, Any], maker: str, steps: int = 6) -> dict[str, Any]:
    """Train, with the calls of torch.distributed counted; what the engine, and the counters, say afterwards."""
    calls: list[tuple[str, int, int]] = []
    exchange = dist.all_to_all_single

    def counting(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(("gather" if kwargs["group"] is mesh.gathers else "exchange", input.numel(), input.nbytes))
        return exchange(output, input, *args, **kwargs)

    dist.all_to_all_single = counting
    try:
        model = make(name)
        trainable = [p for p in model.parameters() if p.requires_grad]
        engine = zs.Engine(
            model, MAKERS[maker](trainable), zs.Plan.from_dict({**plan, "transport": "network"}), mesh=mesh
        )
        peaks = []
        for step in range(steps):
            calls.clear()
            engine.train_step((batch(step, mesh.rank, mesh.ranks), step))
            peaks.append({str(c): (engine.ledger.account(c).current, engine.ledger.account(c).peak) for c in Category})
    finally:
        dist.all_to_all_single = exchange
    memory, traffic = engine.memory(), engine.traffic()
    flats = [s.flat for s in parts_of(engine).all]
    return {
        "memory": {row.category: (row.measured_bytes, row.planned_bytes, row.padding_bytes) for row in memory},
        "traffic": {row.purpose: row for row in traffic},
        "calls": calls,
        "counted": counted(engine),
        "peaks": peaks,
        "flats": [(f.index.numel, f.index.padding, f.dtype.itemsize, f.trainable) for f in flats],
    }


def psi(name: str, trainable: bool = True) -> int:
    """Parameters of a model, each distinct one once."""
    return sum(p.numel() for p in make(name).parameters() if p.requires_grad == trainable)


def expected_states(
    numel: int, ranks: int, zero: int, precision: str, state: int, microbatches: int = 1
) -> dict[str, Fraction]:
    """The paper's formulas, section 5, by category; fp32 has no master, and accumulation keeps fp32 sums."""
    n = Fraction(numel)
    low, master = (2, 4) if precision != "fp32" else (4, 0)
    part = n / ranks
    parameters = part if zero == 3 else n
    if microbatches == 1:
        gradients = low * (part if zero >= 2 else n)
    elif zero == 0:
        gradients = 4 * n  # the sum over the microbatches of this rank
    elif zero == 1:
        gradients = low * n + 4 * part  # whole gradients of a microbatch, and the sum of the reduced slices
    else:
        gradients = 4 * part
    if ranks == 1:
        gradients = (4 if microbatches > 1 else low) * n
    slices = n if zero == 0 else part
    return {
        "parameters": low * parameters,
        "gradients": gradients,
        "master weights": master * slices,
        "optimizer states": state * slices,
    }


CASES = [
    *(("bf16", maker, name, 1) for maker in ("adamw", "momentum") for name in ("Plain", "Even")),
    ("fp32", "adamw", "Plain", 1),
    ("fp16", "adamw", "Tied", 1),
    ("fp32", "adagrad", "Plain", 1),
    ("bf16", "adagrad", "Plain", 1),
    ("bf16", "sgd", "Plain", 1),
    ("bf16", "amsgrad", "Plain", 1),
    ("bf16", "adamw", "Plain", 2),
    ("fp32", "adamw", "Plain", 2),
    ("bf16", "adamw", "Frozen", 1),
    ("bf16", "adamw", "Tiny", 1),
]


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_model_states_follow_the_paper_to_the_byte(pool: Pool, case: tuple[str, str, str, int], zero: int) -> None:
    """Per category: measured = formula for the parameters + the same formula for the padding, in exact fractions."""
    precision, maker, name, microbatches = case
    plan = {"zero": zero, "precision": precision, "microbatches": microbatches}
    for ranks in (2, 4) if case == CASES[0] else (2,):
        for answer in pool.run(measure, ranks, name, plan, maker, 2):
            formula = partial(
                expected_states,
                ranks=ranks,
                zero=zero,
                precision=precision,
                state=BYTES[maker],
                microbatches=microbatches,
            )
            padding = sum(pad for _, pad, _, trainable in answer["flats"] if trainable)
            frozen = sum(numel + pad for numel, pad, _, trainable in answer["flats"] if not trainable)
            assert sum(numel for numel, _, _, trainable in answer["flats"] if trainable) == psi(name)
            assert all(pad < ranks for _, pad, _, _ in answer["flats"])
            if name == "Even":
                assert padding == 0
            elements, extra = formula(psi(name)), formula(padding)
            frozen_bytes = Fraction(frozen * (4 if precision == "fp32" else 2), ranks if zero == 3 else 1)
            for category in STATES:
                wanted = elements[category] + extra[category] + (frozen_bytes if category == "parameters" else 0)
                measured, planned, padded = answer["memory"][category]
                assert measured == wanted, category
                assert planned + padded == wanted, category
                assert answer["counted"][category] == wanted, category


@pytest.mark.parametrize("zero", STAGES)
def test_totals_of_the_paper(pool: Pool, zero: int) -> None:
    """16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N in mixed precision; 16Ψ, 8Ψ + 8Ψ/N, 4Ψ + 12Ψ/N, 16Ψ/N in fp32."""
    count = psi("Even")
    for ranks in (1, 2, 4):
        n = ranks
        totals = {
            "bf16": (
                16 * count,
                4 * count + Fraction(12 * count, n),
                2 * count + Fraction(14 * count, n),
                Fraction(16 * count, n),
            ),
            "fp32": (
                16 * count,
                8 * count + Fraction(8 * count, n),
                4 * count + Fraction(12 * count, n),
                Fraction(16 * count, n),
            ),
        }
        for precision, expected in totals.items():
            for answer in pool.run(measure, ranks, "Even", {"zero": zero, "precision": precision}, "adamw", 2):
                assert sum(answer["memory"][category][0] for category in STATES) == expected[zero]
                assert sum(answer["memory"][category][1] for category in STATES) == expected[zero]


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("every", ["auto", "step", "microbatch"])
def test_plan_and_measurement_agree_under_accumulation(pool: Pool, every: str, zero: int) -> None:
    for precision, reduce_dtype in (("fp32", None), ("bf16", None), ("bf16", "fp32"), ("fp32", "bf16")):
        plan = {
            "zero": zero,
            "precision": precision,
            "microbatches": 2,
            "reduce_every": every,
            "reduce_dtype": reduce_dtype,
        }
        for ranks in (1, 2) if every == "auto" else (2,):
            for answer in pool.run(measure, ranks, "Plain", plan, "adamw", 2):
                for category in STATES:
                    measured, planned, padded = answer["memory"][category]
                    assert measured == planned + padded == answer["counted"][category], (plan, ranks, category)


WIRE = ("gather parameters", "reduce gradients", "gather gradients")


def wire(zero: int, microbatches: int, reductions: int) -> tuple[int, int, int]:
    """Multiples of Ψ on the wire by purpose: section 7, with the microbatches that each gather and reduce anew."""
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * microbatches}[zero]
    return gathers, reductions, 1 if zero == 0 else 0


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("case", [(1, "auto"), (4, "auto"), (2, "step"), (2, "microbatch")], ids=str)
def test_elements_on_the_wire(pool: Pool, case: tuple[int, str], zero: int) -> None:
    """2Ψ, 2Ψ, 2Ψ, 3Ψ a step; with m microbatches (m+1)Ψ at stages 1 and 2, 3mΨ at stage 3; 2Ψ still at stage 0."""
    microbatches, every = case
    reductions = microbatches if every == "microbatch" or (every == "auto" and zero >= 1) else 1
    multiples = wire(zero, microbatches, reductions)
    if microbatches == 1:
        assert sum(multiples) == (2, 2, 2, 3)[zero]
    if microbatches == 4:
        assert sum(multiples) == (2, 5, 5, 12)[zero]
    for name, precision in (("Even", "fp32"), ("Plain", "bf16")):
        plan = {"zero": zero, "microbatches": microbatches, "reduce_every": every, "precision": precision}
        for answer in pool.run(measure, 2, name, plan, "adamw", 3):
            padding = sum(pad for _, pad, _, _ in answer["flats"])
            assert (padding == 0) == (name == "Even")
            sums_locally = microbatches > 1 and reductions == 1
            for purpose, multiple in zip(WIRE, multiples, strict=True):
                row = answer["traffic"][purpose]
                assert row.measured_elements == row.planned_elements == multiple * psi(name), purpose
                assert row.padding_elements == multiple * padding, purpose
                size = 4 if precision == "fp32" or (sums_locally and purpose != "gather parameters") else 2
                if not (purpose == "gather gradients" and microbatches > 1):
                    assert row.measured_bytes == multiple * (psi(name) + padding) * size, purpose
                assert row.sent_bytes * 2 == row.measured_bytes
            calls = answer["calls"]
            gathered = sum(sent for kind, sent, _ in calls if kind == "gather")
            exchanged = sum(sent for kind, sent, _ in calls if kind == "exchange")
            assert 2 * gathered == (multiples[0] + multiples[2]) * (psi(name) + padding)  # half goes to the other rank
            assert 2 * exchanged == multiples[1] * (psi(name) + padding)
            assert sum(nbytes for *_, nbytes in calls) == sum(answer["traffic"][p].sent_bytes for p in WIRE)
            assert len(calls) == sum(answer["traffic"][purpose].calls for purpose in WIRE)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("name", ["Tiny", "TwoOutputs", "Tied", "Checkpointed"])
def test_elements_on_the_wire_for_models_of_other_shapes(pool: Pool, name: str, zero: int) -> None:
    """2Ψ or 3Ψ also where the root owns parameters itself, returns several outputs, is tied, or is recomputed."""
    for answer in pool.run(measure, 2, name, {"zero": zero}, "adamw", 3):
        for purpose, multiple in zip(WIRE, wire(zero, 1, 1), strict=True):
            assert answer["traffic"][purpose].measured_elements == multiple * psi(name), purpose
        assert "gather to evaluate" not in answer["traffic"]


@pytest.mark.parametrize("zero", STAGES)
def test_one_rank_sends_nothing(pool: Pool, zero: int) -> None:
    (answer,) = pool.run(measure, 1, "Plain", {"zero": zero}, "adamw", 2)
    assert answer["calls"] == [] and all(row.measured_elements == 0 for row in answer["traffic"].values())
    assert all(answer["traffic"][purpose].planned_elements == 0 for purpose in WIRE)


STEADY: tuple[dict[str, Any], ...] = (
    {"precision": "bf16"},
    {"microbatches": 2},
    {"precision": "bf16", "microbatches": 2, "reduce_every": "step"},
)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("name", ["Plain", "Checkpointed", "CheckpointedReentrant", "Frozen", "Twice", "Tied"])
def test_nothing_is_allocated_after_the_second_step(pool: Pool, name: str, zero: int) -> None:
    """The plainest model under every plan, the others under one: each plan meets each stage in another of them."""
    for plan in STEADY if name == "Plain" else [STEADY[(len(name) + zero) % 3]]:
        for answer in pool.run(measure, 2, name, {"zero": zero, **plan}, "adamw", 4):
            assert answer["peaks"][3] == answer["peaks"][1], plan


def over_budget(mesh: zs.Mesh, zero: int) -> list[str]:
    messages = []
    for budget in (300, "21KB"):
        model = make("Plain")
        try:
            engine = zs.Engine(
                model,
                MAKERS["adamw"],
                zs.Plan(zero=zero, transport=transport_of(zero), precision="bf16", device_memory=budget),
                mesh=mesh,
            )
            engine.train_step((batch(0, mesh.rank, mesh.ranks), 0))
            messages.append(f"fits in {engine.ledger.total()}")
        except BudgetExceeded as error:
            messages.append(str(error))
    return messages


def test_budget_is_kept(pool: Pool) -> None:
    """What goes beyond is refused by name, with what is held; stage 3 fits where stage 0 does not."""
    assert 16 * psi("Plain") > 21_000 > 8 * psi("Plain")
    for zero in (0, 3):
        for small, large in pool.run(over_budget, 2, zero):
            assert "device_memory is 300 bytes" in small
            if zero == 0:
                assert "of its budget of 21,000 (parameters 2,848, gradients 2,848, master weights 5,696" in large
            else:
                assert large.startswith("fits in ") and int(large.removeprefix("fits in ")) <= 21_000


def test_ledger_counts_only_what_lives(pool: Pool) -> None:
    """Under stage 3 nothing of the gathered parameters is left in BUFFERS after a step, only scratch and scalars."""
    for answer in pool.run(measure, 2, "Plain", {"zero": 3, "precision": "bf16"}, "adamw", 3):
        current, peak = answer["peaks"][2]["buffers"]
        assert current < peak
        assert answer["peaks"][2]["activations"] == (0, 0)
