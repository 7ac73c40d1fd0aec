"""The plain loop is the definition: whole batches, counts, tied weights by use, and each data rank's own buffers."""

from dataclasses import replace

import pytest
import torch
from engine import models
from torch import nn
from verification import stateful
from verification.jobs import job, padded, summed
from verification.zoo_jobs import job as zoo_job

from zeroshard.errors import BatchError, ModelError
from zeroshard.verification.plain import Plain


def test_a_step_is_that_of_the_whole_batch() -> None:
    made = job("TiedFive", 2, microbatches=4)
    plain, whole = Plain(made), made.model(0)
    step = plain.step(0)
    loss = whole(*made.batch(0))
    loss.backward()
    assert step.loss == pytest.approx(loss.item(), rel=1e-6) and len(step.losses) == 8
    for name, p in whole.named_parameters():
        torch.testing.assert_close(step.gradients[name], p.grad, rtol=1e-5, atol=1e-7)
    assert step.norm == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in whole.parameters()])), rel=1e-5)
    assert plain.alone(plain.whole(0)).value.item() == pytest.approx(step.loss, rel=1e-6)


def test_sums_are_divided_by_the_count_of_the_step() -> None:
    made = replace(job("Words", 2, microbatches=2), loss=summed, batch=padded)
    step, whole = Plain(made).step(0), made.model(0)
    total, count = summed(whole(*padded(0)), padded(0))
    (total / count).backward()
    assert step.loss == pytest.approx(total.item() / count, rel=1e-6)
    torch.testing.assert_close(step.gradients["head.weight"], whole.head.weight.grad, rtol=1e-5, atol=1e-7)  # type: ignore[union-attr]


def test_contributions_and_uses_add_up_to_the_gradient() -> None:
    plain = Plain(job("TiedFive", 2, microbatches=2))
    gradient = plain.step(1).gradients["embed.weight"]
    uses = plain.by_use(1, "embed.weight")
    assert list(uses) == ["embed.weight", "head.weight"] and len(plain.contributions(1, "embed.weight")) == 4
    for parts in (plain.contributions(1, "embed.weight"), list(uses.values())):
        torch.testing.assert_close(sum(parts[1:], parts[0]), gradient, rtol=1e-5, atol=1e-7)
    assert plain.model.head.weight is plain.model.embed.weight  # type: ignore[union-attr]


def test_an_update_clips_and_steps() -> None:
    made = job("Five", 2, clip_norm=0.01)
    plain, other = Plain(made), made.model(0)
    gradients = plain.step(0).gradients
    plain.update(gradients)
    optimizer = made.optimizer(other.parameters())
    for name, p in other.named_parameters():
        p.grad = gradients[name]
    nn.utils.clip_grad_norm_(other.parameters(), 0.01)
    optimizer.step()
    for name, p in other.named_parameters():
        assert torch.equal(plain.weights()[name], p)


def test_each_data_rank_has_its_own_buffers() -> None:
    plain = Plain(zoo_job("convolutions", "zero2"))
    plain.step(0)
    first, second = ({k: v for k, v in plain.buffers(rank).items() if k.endswith("running_mean")} for rank in range(2))
    assert first and all(not torch.equal(first[name], second[name]) for name in first)


def test_random_numbers_are_told_from_state() -> None:
    Plain(job("Five", 2)).refuse_unlike_calls()
    with pytest.raises(ModelError, match=r"draws random numbers.*dropout to 0"):
        Plain(job("Dropped", 2)).refuse_unlike_calls()
    with pytest.raises(ModelError, match=r"with the same random numbers differ.*global variable"):
        Plain(replace(job("Five", 2), factory=stateful.CountsOutside)).refuse_unlike_calls()


@pytest.mark.parametrize("kind", [stateful.Counts, stateful.CountsInTensor, stateful.CountsInBuffer])
def test_each_data_rank_has_its_own_counter(kind: type[nn.Module]) -> None:
    made = replace(job("Five", 2, microbatches=2), factory=kind)
    plain, alone, bare = Plain(made), Plain(job("Five", 2, microbatches=2)), {}
    plain.refuse_unlike_calls()
    for step in range(2):
        bare[step] = alone.step(step).losses
        for part, (loss, _) in enumerate(plain.step(step).losses):
            calls = 2 * step + part % 2 + 1
            assert loss == pytest.approx(bare[step][part][0] * (1 + 0.1 * calls), rel=1e-6)


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(BatchError, match="without a scalar loss"):
        Plain(job("Words", 2)).step(0)


def test_initial_values_of_a_model_on_the_meta_device_are_given() -> None:
    def empty() -> nn.Module:
        with torch.device("meta"):
            return models.Five()

    state = models.build("Five").state_dict()
    plain = Plain(replace(job("Five", 2), factory=empty), state)
    assert torch.equal(plain.weights()["head.weight"], state["head.weight"])
