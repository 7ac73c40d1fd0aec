"""transformers' Trainer above the engine ends where a loop by hand ends on the batches that its ranks saw."""

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from selection import by_default

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> dict[str, Any]:
    """What rank 0 of one job of two ranks saw, and where it saved the model."""
    folder = tmp_path_factory.mktemp("trainer")
    words = (str(folder), "--whole") if whole else (str(folder),)
    run_job(ROOT / "tests" / "interop" / "trainer_runs.py", *words)
    return {**torch.load(folder / "found.pt"), "saved": folder / "saved"}


def by_hand(batches: list[list[torch.Tensor]], steps: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Mean losses, norms and last weights of a plain loop over all ranks' batches, under the same schedule."""
    from interop.trainer_runs import gpt2

    model = gpt2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    each = len(batches[0]) // steps
    losses, norms = [], []
    for step in range(steps):
        rows = [batch for mine in batches for batch in mine[step * each : (step + 1) * each]]
        loss = torch.stack([model(input_ids=batch, labels=batch).loss for batch in rows]).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


@pytest.mark.parametrize("case", by_default(["zero 1", "zero 3", "accumulate"], "zero 3", "accumulate"))
def test_it_follows_a_plain_loop(found: dict[str, Any], case: str) -> None:
    run = found[case]
    losses, norms, weights = by_hand(run["batches"], len(run["logs"]))
    assert len(losses) == (3 if case == "accumulate" else 6)
    assert [entry["loss"] for entry in run["logs"]] == pytest.approx(losses, rel=1e-4)
    assert [entry["grad_norm"] for entry in run["logs"]] == pytest.approx(norms, rel=1e-4)
    assert set(run["weights"]) == set(weights)
    for name, value in weights.items():
        torch.testing.assert_close(run["weights"][name], value, rtol=1e-4, atol=1e-5)


def test_the_ranks_saw_different_rows(found: dict[str, Any]) -> None:
    first, second = found["zero 3"]["batches"]
    assert not any(torch.equal(here, there) for here, there in zip(first, second, strict=True))


def test_the_saved_model_is_the_trained_one(found: dict[str, Any]) -> None:
    from interop.trainer_runs import rows
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(found["saved"]).eval()
    for name, value in model.state_dict().items():
        assert torch.equal(value, found["zero 3"]["weights"][name]), name
    tokens = torch.stack([row["input_ids"] for row in rows()[:8]])
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert found["zero 3"]["evaluated"] == pytest.approx(loss, rel=1e-4)


def test_half_of_the_states_are_not_saved_as_if_they_were_all(found: dict[str, Any]) -> None:
    trainer, optimizer = found["errors"]
    assert trainer.startswith("ValueError: The Trainer cannot save optimizer states in slices")
    assert optimizer.startswith("OptimizerError: The optimizer's states are in slices")
