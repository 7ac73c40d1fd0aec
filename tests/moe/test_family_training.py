"""Models of transformers train under expert parallelism as they do in one process."""

import functools
from typing import Any

import pytest
import torch
from pool import Pool
from selection import by_default

import zeroshard as zs
from zeroshard.moe.experts.families import find_experts

pytest.importorskip("transformers")
from engine.zoo import STEPS, Case, alone, batch, check, engine_for, train

from moe.families import FAMILIES, VOCABULARY, seeded

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"expert_parallel": 2, "zero": 0}),
    "2-zero3": (2, {"expert_parallel": 2, "zero": 3, "transport": "network"}),
    "4-zero2": (4, {"expert_parallel": 4, "zero": 2}),
    "2x2-zero3": (4, {"expert_parallel": 2, "zero": 3}),
}


def pairs(generator: torch.Generator) -> dict[str, Any]:
    """Four rows of tokens that are to be continued, or translated to themselves."""
    tokens = torch.randint(2, VOCABULARY, (4, 9), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def case(family: str) -> Case:
    """Five experts, which no plan divides; groups of DeepSeek's need an even number."""
    experts = 6 if family == "deepseek_v3" else 5
    return Case(functools.partial(seeded, family, experts=experts), pairs)


@functools.cache
def reference(family: str) -> Any:
    """What the plain loop gives."""
    return alone(case(family))


def train_family(mesh: zs.Mesh, family: str, plan: str) -> Any:
    """Losses of this rank, and the weights of all experts."""
    return train(mesh, case(family), **PLANS[plan][1])


@pytest.mark.parametrize("plan", by_default(PLANS, "4-zero2", "2x2-zero3"))
@pytest.mark.parametrize("family", by_default(FAMILIES, "mixtral", "switch_transformers"))
def test_trains_as_in_one_process(pool: Pool, family: str, plan: str) -> None:
    check(pool.run(train_family, PLANS[plan][0], family, plan), *reference(family))


def recomputing(family: str) -> Case:
    """The same, recomputing its blocks in the way that the library offers."""
    made = case(family)

    def build() -> Any:
        model: Any = made.build()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        return model

    return Case(build, pairs)


def train_recomputing(mesh: zs.Mesh, family: str) -> Any:
    """As `train_family`, with recomputation."""
    engine = engine_for(mesh, recomputing(family), zero=2, expert_parallel=2)
    losses = []
    for step in range(STEPS):
        rows = batch(recomputing(family), step, mesh.rank, mesh.ranks)
        losses.append(float(engine.train_step(rows).loss))
    return losses, engine.state_dict()


@pytest.mark.parametrize("family", by_default(["mixtral", "gpt_oss"], "mixtral"))
def test_recomputation_of_the_library_changes_nothing(pool: Pool, family: str) -> None:
    check(pool.run(train_recomputing, 2, family), *reference(family))


def held_by(mesh: zs.Mesh, family: str) -> tuple[list[str], set[int], str]:
    """The names of a model's parameters in an engine, how many experts of each mixture a rank holds, and a class."""
    made = case(family).build()
    mixtures = find_experts(made)
    engine = zs.Engine(made, torch.optim.SGD, zs.Plan(expert_parallel=2), mesh=mesh)
    held = set()
    for found in mixtures:
        held |= {len(found.module.get_parameter(name)) for name in found.stacked}
        held |= {sum(all(len(p) for p in m.parameters()) for m in found.modules)} if found.modules else set()
    return [name for name, _ in engine.model.named_parameters()], held, type(engine.model).__name__


@pytest.mark.parametrize("family", by_default(FAMILIES, "mixtral", "deepseek_v3", "switch_transformers"))
def test_classes_and_names_stay_as_they_are(pool: Pool, family: str) -> None:
    model = case(family).build()
    for rank, (names, held, kind) in enumerate(pool.run(held_by, 2, family)):
        assert names == [name for name, _ in model.named_parameters()]
        assert kind == type(model).__name__
        experts = (3, 3) if family == "deepseek_v3" else (3, 2)
        assert held == {experts[rank]}
