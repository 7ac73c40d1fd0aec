"""The loss contract without an engine: forms of a loss, the power of two, and what is refused."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import error_of
from pool import Pool

import zeroshard as zs
from zeroshard.errors import BatchError, PlanError
from zeroshard.pipeline.stage import means_alone
from zeroshard.step.context import Within
from zeroshard.step.losses import (
    BY_MEAN,
    BY_SUM,
    Loss,
    LossReport,
    SameBatches,
    StepLosses,
    penalised,
)
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

SUM = torch.tensor(6.0)


def reports(*pairs: tuple[float, float]) -> list[LossReport]:
    """Of ranks with (sum, count)."""
    return [LossReport(BY_SUM, total, items) for total, items in pairs]


def test_a_loss_function_returns_a_mean_or_a_sum() -> None:
    assert Loss.of(SUM) == Loss(SUM)
    assert Loss.of(Loss(SUM, 3.0)) == Loss(SUM, 3.0)
    assert Loss.of((SUM, 4)) == Loss(SUM, 4.0) and Loss.of([SUM.view(1, 1), 4]).value.shape == ()
    assert Loss.of((SUM, torch.tensor([4]))).items == torch.tensor(4)
    assert Loss.of((SUM, 4, torch.tensor(0.5))) == Loss(torch.tensor(8.0), 4.0)
    assert Loss.of((SUM, torch.tensor(4), torch.tensor(0.5))).value == 8.0


def test_means_have_weights_and_sums_have_none() -> None:
    assert Loss(SUM).weighted(0.5).value == 3.0
    assert Loss(SUM, 2.0).weighted(0.5) == Loss(SUM, 2.0)


@pytest.mark.parametrize(
    "returned, found",
    [
        ((SUM,), "returned 1 values"),
        ((SUM, 1, SUM, SUM), "returned 4 values"),
        ((2.5, 3), "is 2.5"),
        ((torch.zeros(3), 3), r"of shape \[3\]"),
        ((SUM.half(), 3), r"float16.*logits\.float\(\)"),
    ],
)
def test_sums_that_are_none(returned: Any, found: str) -> None:
    with pytest.raises(BatchError, match=found):
        Loss.of(returned)


@pytest.mark.parametrize("count", [None, "4", True, [4], torch.zeros(2), torch.tensor(1j), math.nan])
def test_a_count_that_is_no_number_is_told_to_all_ranks(count: Any) -> None:
    losses = StepLosses()
    losses.add(Loss.of((SUM, count)))
    assert losses.read([6.0])
    for rank in (0, 1):
        ranks = reports((1.0, 1.0), (1.0, 1.0))
        ranks[rank] = losses.report
        with pytest.raises(BatchError, match=f"count of a loss is not a number on rank {rank}, .*loss_sum, count=n"):
            losses.close(ranks, 2)


@pytest.mark.parametrize("count, shown", [(-3, "-3"), (torch.tensor(-2), "-2"), (math.inf, "inf")])
def test_a_count_below_zero_or_without_end(count: Any, shown: str) -> None:
    losses = StepLosses()
    losses.add(Loss.of((SUM, 5)))
    losses.add(Loss.of((SUM, count)))  # hidden in the sum of both
    losses.read([6.0, 6.0])
    with pytest.raises(BatchError, match=f"The count of a loss is {shown} on rank 0, "):
        losses.close([losses.report], 1)


def test_sums_and_means_do_not_mix() -> None:
    losses = StepLosses()
    both = [LossReport(BY_MEAN), LossReport(), *reports((1.0, 1.0)), LossReport(BY_SUM | BY_MEAN, 1.0, 1.0)]
    with pytest.raises(BatchError, match="by sum on rank 2, 3 and by mean on rank 0, 3; "):
        losses.close(both, 4)
    assert losses.close([LossReport(BY_MEAN), LossReport()], 2) == 1.0 and losses.mean is None


def test_a_mean_over_ranks_is_in_float64_where_losses_are() -> None:
    wide, narrow = StepLosses(), StepLosses()
    wide.add(Loss.by_sum(torch.tensor(1.0, dtype=torch.float64), 3))
    narrow.add(Loss.by_sum(torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(3)))
    for losses in (wide, narrow):
        losses.read([1.0] * len(losses.unread()))
        losses.close([losses.report, LossReport()], 2)
    assert wide.mean is not None and wide.mean.dtype == torch.float64 and float(wide.mean) == 1 / 3
    assert narrow.mean is not None and narrow.mean.dtype == torch.float32


@pytest.mark.parametrize("count", [0, torch.tensor(0), 4, torch.tensor(4)])
def test_a_sum_over_no_tokens_is_zero(count: Any) -> None:
    weights = torch.ones(3, 5, requires_grad=True)
    mean = torch.nn.functional.cross_entropy(weights, torch.full((3,), -100))  # 0/0
    loss = Loss.by_sum(mean * count, count)
    loss.value.backward()
    if count:
        assert loss.value.isnan()  # which a step refuses
    else:
        assert loss.value == 0 and weights.grad is not None and not weights.grad.any()
    assert Loss.by_sum(torch.tensor(3.0), 0).value == 3.0


def test_no_token_on_any_rank() -> None:
    losses = StepLosses()
    assert losses.close(reports((0.0, 0.0), (3.0, 0.0)), 2) == 0.0 == losses.mean and losses.count is None
    losses = StepLosses(skips=True)
    losses.close(reports((3.0, 2.0)), 1)
    losses.clear()
    assert math.isnan(losses.close(reports((0.0, 0.0)), 1)) and losses.mean is not None and losses.mean.isnan()
    losses.clear()
    assert losses.count == 2.0


def test_the_divisor_follows_the_count_of_the_last_step() -> None:
    losses = StepLosses()
    assert losses.divisor == 1024.0 and losses.likely(4.0) == 0.25
    assert losses.close(reports((900.0, 300.0), (0.0, 0.0)), 2) == 1024.0 / 150
    assert losses.mean == 3.0
    assert losses.divisor == 1024.0  # another backward of the same step
    losses.clear()
    assert losses.divisor == 128.0
    assert losses.likely(1.0) == losses.close(reports((1.0, 300.0)), 2) == 128.0 / 150
    losses.clear()
    losses.clear()  # a discard
    assert losses.count == 150.0


@settings(derandomize=True, deadline=None)
@given(st.floats(1e-3, 1e12))
def test_the_divisor_is_a_power_of_two_near_the_count(count: float) -> None:
    losses = StepLosses()
    losses.count = count
    fraction, _ = math.frexp(losses.divisor)
    assert fraction == 0.5 and 0.7071 < losses.divisor / count < 1.41422


def test_what_a_backward_runs_on() -> None:
    losses = StepLosses()
    losses.count = 4.0
    total = SUM.clone().requires_grad_()
    assert losses.scaled(Loss(total), 1.0) is total and losses.scaled(Loss(total), 8.0) == 48.0
    assert losses.scaled(Loss(total, 4.0), 1.0) == 1.5 and losses.scaled(Loss(total, 4.0), 4.0) is total


def test_losses_that_are_not_finite_are_noticed() -> None:
    losses = StepLosses()
    losses.add(Loss(SUM, torch.tensor(3)))
    losses.add(Loss(SUM, 2))
    assert [value.item() for value in losses.unread()] == [6.0, 6.0] and losses.report == LossReport()
    assert losses.read([6.0, 7.0]) and losses.report == LossReport(BY_SUM, 13.0, 5.0)
    assert not losses.read([6.0, math.inf])


def test_a_stream_refuses_sums() -> None:
    assert means_alone(lambda batch: Loss(SUM), "2bw")(None) == Loss(SUM)
    with pytest.raises(PlanError, match=r"by sum with a count, and schedule='2bw'.*schedule='1f1b'"):
        means_alone(lambda batch: Loss(SUM, 3.0), "2bw")(None)


def test_counts_on_a_device_are_read_with_everything_else() -> None:
    losses = StepLosses()
    for count in (torch.tensor(5, device="meta"), torch.tensor(3), torch.tensor([4], device="meta")):
        losses.add(Loss.of((SUM, count)))
    assert [(value.device.type, value.dtype) for value in losses.unread()[3:]] == [("meta", torch.float32)] * 2
    assert losses.read([6.0, 6.0, 6.0, 5.0, 4.0]) and losses.report == LossReport(BY_SUM, 18.0, 12.0)


class Penalised(torch.nn.Module):
    """w * x, with the penalty w ** 2."""

    adds_penalty = True

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return penalised(self.w * x, self.w**2)


def test_gradient_has_penalty_once_at_the_weight_of_the_backward() -> None:
    model, x = Penalised(), torch.tensor([1.0, 2.0])
    model(x).sum().backward()
    assert model.w.grad == 3.0 + 2 * 3.0  # a plain backward: weight 1
    model.w.grad = None
    with Within(penalty_weight=0.25):
        model(x).sum().backward()
    assert model.w.grad == 3.0 + 0.25 * 6.0


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_adds_the_penalty_once(reentrant: bool) -> None:
    model, x = Penalised(), torch.tensor([1.0, 2.0], requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert model.w.grad == 3.0 + 6.0


def test_weights_of_means_and_sums() -> None:
    losses, one = StepLosses(), torch.tensor(1.0)
    assert losses.weight(Loss(one).weighted(0.5), 8.0) == 4.0
    assert losses.weight(Loss(one, 512.0).weighted(0.5), 8.0) == 8.0 * 512 / losses.divisor


SMALL = GPTConfig(vocabulary=20, context=8, width=8, heads=2, layers=2)

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor_parallel": 2}),
    "tensor-and-data": (4, {"tensor_parallel": 2, "zero": 1}),
    "stages": (2, {"pipeline_parallel": 2, "microbatches": 2}),
    "stages-without-flush": (
        2,
        {"pipeline_parallel": 2, "pipeline_parallel.schedule": "pipedream", "microbatches": 2},
    ),
    "stages-and-tensor": (4, {"pipeline_parallel": 2, "tensor_parallel": 2, "microbatches": 2}),
}


def train(mesh: zs.Mesh, settings: dict[str, Any], by_rank: bool, by_call: bool) -> list[str]:
    """The error of each of three steps; batches differ from the second on, in their order of rows alone."""
    plan = zs.Plan.from_dict(settings)
    make = partial(torch.optim.SGD, lr=0.1)
    engine = zs.Engine(GPT(SMALL), make, plan, example=(torch.zeros(2, 8, dtype=torch.int64),) * 2, mesh=mesh)
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + engine.data_rank)
        given = torch.randint(20, (4, 9), generator=generator)
        if by_rank and step and mesh.rank % 2:
            given = given.flip(0)
        found.append(error_of(partial(call if by_call else train_step, engine, given)))
    if engine.plan.streams:
        found.append(error_of(engine.flush))
    return found


def train_step(engine: zs.Engine, given: torch.Tensor) -> None:
    engine.train_step((given[:, :-1], given[:, 1:]))


def call(engine: zs.Engine, given: torch.Tensor) -> None:
    engine.backward(engine(given[:, :-1], given[:, 1:]))
    engine.step()


@pytest.mark.parametrize("kind", list(KINDS))
def test_different_batches_on_ranks_that_share_a_model_are_an_error_on_all(pool: Pool, kind: str) -> None:
    ranks, settings = KINDS[kind]
    for errors in pool.run(train, ranks, settings, True, kind == "tensor"):
        assert errors[0] == "nothing"
        late = errors[3:] if kind == "stages-without-flush" else errors[1:3]
        for error in late:
            assert "BatchError" in error
            assert "given different batches" in error
            assert "rank=engine.data_rank" in error


def test_equal_batches_pass(pool: Pool) -> None:
    for kind in ("tensor-and-data", "stages-and-tensor"):
        ranks, settings = KINDS[kind]
        assert pool.run(train, ranks, settings, False, False) == [["nothing"] * 3] * ranks


def test_nothing_is_read_where_no_ranks_share_a_batch() -> None:
    alone = SameBatches([[0], [1]])
    alone.add(torch.ones(3))
    assert alone.read() == ()
    alone.check([], 0)


def test_every_kind_of_tensor_has_a_checksum() -> None:
    tensors = [torch.ones(2, 3), torch.ones(2, dtype=torch.bfloat16), torch.ones(3, dtype=torch.complex64)]
    tensors += [
        torch.tensor(2.5),
        torch.ones(2, 2, dtype=torch.bool),
        torch.ones(0, 4),
        torch.ones(4, dtype=torch.uint8),
    ]
    seen = set()
    for tensor in tensors:
        for value in (tensor, tensor * 0):
            batches = SameBatches([[0, 1]])
            batches.add({"x": value, "n": 3})
            seen.add(batches.read())
    assert len(seen) == 2 * len(tensors) - 1  # without elements there is no other value
