"""Models whose layers are split over two ranks and which are cut into two stages, against the plain loop."""

import functools
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS
from pool import Pool
from selection import by_default
from split_models.small_models import VOCABULARY, family
from torch import Tensor, nn

import zeroshard as zs

STEPS, ROWS, POSITIONS = 3, 8, 11  # positions that two ranks do not divide
CASES: list[tuple[str, str, bool, dict[str, Any]]] = [
    ("gpt", "1f1b", True, {}),
    ("gpt", "zb-h1", False, {}),
    ("gpt2", "zb-h1", True, {}),
    ("llama", "zb-h1", True, {"num_key_value_heads": 1}),
    ("llama", "interleaved", True, {"num_hidden_layers": 4}),
    ("llama", "2bw", False, {"tie_word_embeddings": True}),
    ("qwen3", "gpipe", True, {"tie_word_embeddings": True}),
    ("gemma2", "pipedream-flush", False, {}),
    ("phi3", "zb-h1", True, {"num_key_value_heads": 1}),
    ("falcon", "1f1b", True, {}),
    ("opt", "gpipe", False, {}),
    ("bert", "naive", True, {}),
]
SHOWN = [CASES[n] for n in (0, 2, 4, 5, 10)]


def model_of(name: str, changes: dict[str, Any]) -> nn.Module:
    """In evaluation mode, which has no dropout."""
    torch.manual_seed(0)
    return family(name, "cpu", **changes).eval()  # type: ignore[no-any-return]


def batch(name: str, step: int, rows: int, data_rank: int = 0, data_ranks: int = 1) -> Any:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (rows, POSITIONS), generator=generator).chunk(data_ranks)[data_rank]
    return (tokens, tokens) if name == "gpt" else {"input_ids": tokens, "labels": tokens, "use_cache": False}


def loss_of(model: Any, given: Any) -> Tensor:
    output = model(*given) if isinstance(given, tuple) else model(**given)
    return output if isinstance(output, Tensor) else output.loss


def train(mesh: zs.Mesh, name: str, changes: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """What a rank sees of a few steps and an evaluation after the first."""
    settings = {"tensor_parallel": 2, "pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", **plan}
    model = model_of(name, changes)
    made = zs.Plan.from_dict({"microbatches": 4, **settings})
    engine = zs.Engine(model, OPTIMIZERS["sgd"], made, mesh=mesh, example=batch(name, 0, 2))
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        result = engine.train_step(batch(name, step, ROWS, engine.data_rank, engine.data_ranks))
        seen["losses"].append(None if result.loss is None else result.loss.item())
        seen["norms"].append(result.grad_norm)
        if not step and not made.streams:
            with torch.no_grad():
                seen["evaluation"] = float(loss_of(engine, batch(name, 9, 3)))
    seen["wire"] = {row.purpose: (row.planned_elements, row.measured_elements) for row in engine.traffic()}
    engine.flush()
    engine.check_replicas()
    seen["weights"] = engine.state_dict()
    return seen


@functools.cache
def plain(name: str, changes: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    model = model_of(name, dict(changes))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(name, step, ROWS))
        loss.backward()
        seen["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
        seen["losses"].append(loss.item())
        if not step:
            with torch.no_grad():
                seen["evaluation"] = float(loss_of(model, batch(name, 9, 3)))
    seen["weights"] = model.state_dict()
    return seen


def compare(seen: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for mine in seen:
        for what in ("losses", "norms", "evaluation"):
            assert mine[what] == pytest.approx(wanted[what], rel=1e-5), what
        assert mine["weights"].keys() == wanted["weights"].keys()
        for key, value in wanted["weights"].items():
            torch.testing.assert_close(mine["weights"][key], value, rtol=1e-5, atol=1e-6)
        formulas = {purpose: both for purpose, both in mine["wire"].items() if both[0] is not None}
        assert all(planned == measured for planned, measured in formulas.values()), formulas
        assert "send activations" in formulas or "send their gradients" in formulas


@pytest.mark.parametrize("case", by_default(CASES, *SHOWN), ids=lambda case: "-".join(map(str, case)).replace(" ", ""))
def test_two_stages_of_two_ranks(pool: Pool, case: tuple[str, str, bool, dict[str, Any]]) -> None:
    name, schedule, sequence, changes = case
    plan = {"pipeline_parallel.schedule": schedule, "tensor_parallel.sequence": sequence}
    plan |= {"pipeline_parallel.virtual_stages": 2} if schedule == "interleaved" else {}
    if schedule != "2bw":
        compare(pool.run(train, 4, name, changes, plan), plain(name, tuple(changes.items())))
        return
    *_, whole = pool.run(train, 2, name, changes, {**plan, "tensor_parallel": 1})
    for mine in pool.run(train, 4, name, changes, plan):
        for key, value in whole["weights"].items():
            torch.testing.assert_close(mine["weights"][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.whole  # tests/tensor/test_training.py has such a layout
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_two_stages_of_two_data_ranks_of_two_ranks(wide_pool: Pool, schedule: str, zero: int) -> None:
    plan = {"pipeline_parallel.schedule": schedule, "zero": zero, "microbatches": 2}
    changes = {"num_key_value_heads": 1, "tie_word_embeddings": True}
    compare(wide_pool.run(train, 8, "llama", changes, plan), plain("llama", tuple(changes.items())))
