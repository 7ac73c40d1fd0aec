"""Engines that split the layers of every family on the pool's workers, and plain loops to compare with."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from plain_loop import plain_loop
from split_models.small_models import VOCABULARY, family
from torch import Tensor, nn

import zeroshard as zs

Make = Callable[[Any], torch.optim.Optimizer]  # of parameters
ROWS, POSITIONS = 2, 12  # rows of a microbatch
# Some gradients are rounding of zero, such as those of biases of keys: without a large eps Adam makes steps of them.
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-4)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # the family, and changes of its configuration
    "gpt": ("gpt", {}),
    "gpt2": ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    **{f"llama-{n}": ("llama", {"num_key_value_heads": n}) for n in (1, 2, 4)},
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 8}),
    "phi3": ("phi3", {}),
    "falcon": ("falcon", {}),
    "falcon-groups": ("falcon-groups", {}),
    "opt": ("opt", {"dropout": 0.0, "attention_dropout": 0.0}),
    "bert": ("bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "t5": ("t5", {"dropout_rate": 0.0, "decoder_start_token_id": 0}),
}


@dataclass(frozen=True)
class Run:
    """A few steps of a model under a plan.

    Attributes:
        plan: settings as pairs.
        parts: microbatches of a step over all data ranks.
    """

    name: str
    plan: tuple[tuple[str, Any], ...] = ()
    parts: int = 1
    steps: int = 4
    positions: int = POSITIONS


@dataclass
class Seen:
    """The results of a run, on one rank or of a plain loop."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, "np.ndarray[Any, Any]"] = field(default_factory=dict)
    differences: dict[str, tuple[int, int]] = field(default_factory=dict)  # planned and measured, where unlike
    data_rank: int = 0


def family_of(name: str) -> nn.Module:
    """A model of MODELS on the CPU."""
    kind, changes = MODELS[name]
    made: nn.Module = family(kind, "cpu", **changes).train()
    return made


def build(name: str, seed: int = 0) -> nn.Module:
    """The same with weights of a seed."""
    torch.manual_seed(seed)
    return family_of(name)


def batch(name: str, step: int, rows: int, positions: int = POSITIONS) -> dict[str, Tensor]:
    """The whole batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    words, labels = torch.randint(3, VOCABULARY, (2, rows, positions), generator=generator)
    if name == "gpt":
        return {"tokens": words, "targets": labels}
    if name == "t5":
        return {"input_ids": words, "labels": labels[:, : positions * 2 // 3].contiguous()}
    if name == "bert":
        return {"input_ids": words, "labels": torch.where(labels % 3 == 0, words, -100)}
    return {"input_ids": words, "labels": words}


def between(rows: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """Rows [first, last) of a batch."""
    return {key: value[first:last].contiguous() for key, value in rows.items()}


def loss_of(output: Any) -> Tensor:
    """What a model returned, or its loss."""
    found: Tensor = output if isinstance(output, Tensor) else output.loss
    return found


@functools.cache
def plain(name: str, parts: int, steps: int, positions: int, clip: float | None, make: Make = ADAMW) -> Seen:
    """A loop in one process with the optimizer that is made: the mean over the parts of a step."""
    rows = [batch(name, step, ROWS * parts, positions) for step in range(steps)]
    each = [[between(whole, part * ROWS, (part + 1) * ROWS) for part in range(parts)] for whole in rows]
    found = plain_loop(build(name), make, each, lambda model, part: loss_of(model(**part)), clip)
    return Seen(found.losses, found.norms, arrays(found.weights))


def arrays(state: dict[str, Any]) -> dict[str, "np.ndarray[Any, Any]"]:
    """The floating-point tensors of a state dict, in a form that goes through a pipe without file handles."""
    return {name: value.float().numpy().copy() for name, value in state.items() if value.is_floating_point()}


def make_engine(mesh: zs.Mesh, run: Run, seed: int = 0, make: Make = ADAMW) -> zs.Engine:
    """The engine of a run; a pipeline takes a row as its example."""
    plan = zs.Plan.from_dict(dict(run.plan))
    example = between(batch(run.name, 0, 1, run.positions), 0, 1) if plan.pipelined else None
    return zs.Engine(build(run.name, seed), make, plan, mesh=mesh, example=example)


def take_steps(engine: zs.Engine, run: Run, seen: Seen, steps: int) -> None:
    """Go on for some steps, noting losses and norms."""
    for step in range(engine.steps, engine.steps + steps):
        own = ROWS * run.parts // engine.data_ranks
        first = engine.data_rank * own
        result = engine.train_step(between(batch(run.name, step, ROWS * run.parts, run.positions), first, first + own))
        seen.losses.append(float("nan") if result.loss is None else float(result.loss))
        seen.norms.append(float(result.grad_norm))


def train(mesh: zs.Mesh, runs: list[Run]) -> list[Seen]:
    """What one rank sees of each run."""
    found = []
    for run in runs:
        engine = make_engine(mesh, run, seed=mesh.rank)  # unlike on each rank: those of rank 0 are to be taken
        seen = Seen(data_rank=engine.data_rank)
        take_steps(engine, run, seen, run.steps)
        engine.check_replicas()
        seen.weights = arrays(engine.state_dict())
        rows = [
            *((f"wire {r.purpose}", r.planned_elements, r.measured_elements) for r in engine.traffic()),
            *(
                (f"bytes {r.category}", r.planned_bytes and r.planned_bytes + r.padding_bytes, r.measured_bytes)
                for r in engine.memory()
            ),
        ]
        seen.differences = {what: (a, b) for what, a, b in rows if a is not None and a != b}
        found.append(seen)
    return found


def check(run: Run, seen: list[Seen], tolerance: float = 1e-5) -> None:
    """The ranks' losses, norms and weights are those of the plain loop, and their formulas were met.

    Raises:
        AssertionError: naming the run, and what differs.
    """
    settings = dict(run.plan)
    wanted = plain(run.name, run.parts, run.steps, run.positions, settings.get("clip_norm"))
    data = {mine.data_rank: mine.losses for mine in seen if not np.isnan(mine.losses).any()}
    losses = np.mean(list(data.values()), 0)
    np.testing.assert_allclose(losses, wanted.losses, tolerance, err_msg=f"losses of {run}")
    for rank, mine in enumerate(seen):
        np.testing.assert_allclose(mine.norms, wanted.norms, tolerance, err_msg=f"norms of {run} on rank {rank}")
        assert mine.weights.keys() == wanted.weights.keys(), run
        for name, value in wanted.weights.items():
            np.testing.assert_allclose(
                mine.weights[name], value, tolerance, tolerance, err_msg=f"{name} of {run} on rank {rank}"
            )
        assert not mine.differences, (run, mine.differences)
