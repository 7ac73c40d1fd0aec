"""Recomputed blocks of split layers and of models of transformers: the same losses, and no sum is sent twice."""

from typing import Any

import pytest
import torch
from moe import mixed
from pool import Pool
from selection import by_default
from tensor.test_dropout_of_families import ADAM, STEPS, batch, model_of

import zeroshard as zs
from zeroshard.traffic import Purpose


def train(mesh: zs.Mesh, name: str, plans: list[dict[str, Any]], cached: bool = False) -> list[Any]:
    """Under each plan the losses and norms of some steps, the calls for activations of the last, and recomputations."""
    seen = []
    for plan in plans:
        torch.manual_seed(5 + mesh.rank)
        model = model_of(name, "eager")
        for module in model.modules() if not cached else ():  # without, tensors have other strides, and sums other bits
            if hasattr(getattr(module, "config", None), "use_return_dict"):
                module.config.use_cache = False
        engine = zs.Engine(model, ADAM, zs.Plan.from_dict(plan), mesh=mesh)
        torch.manual_seed(5 + mesh.rank)
        results = [engine.train_step(batch(name, step)) for step in range(STEPS)]
        calls = {row.purpose: row.calls for row in engine.traffic()}
        sums, gathers = (calls.get(each, 0) for each in (Purpose.SUM_ACTIVATIONS, Purpose.GATHER_ACTIVATIONS))
        losses = [(float(result.loss), result.grad_norm) for result in results if result.loss is not None]
        seen.append((losses, sums, gathers, engine.recomputed))
    return seen


def recomputes(name: str, plan: dict[str, Any]) -> bool:
    """Whether blocks are computed again: under "sqrt" two are one segment, the last, which is kept; T5 has four."""
    return name == "t5" or plan.get("activations") != "sqrt"


@pytest.mark.parametrize("rng", ["fast", "exact"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", by_default(["gpt", "gpt2", "llama", "t5"], "llama"))
def test_split_layers_send_each_sum_once(pool: Pool, name: str, sequence: bool, rng: str) -> None:
    pytest.importorskip("transformers")
    split = {"zero": 1, "tensor_parallel": 2, "tensor_parallel.sequence": sequence, "rng": rng}
    policies = [{"activations": each} for each in ("off", "blocks", "sqrt", "selective")]
    again = [{"activations.recompute": each, "activations.save_sums": False} for each in ("blocks", "selective")]
    policies += again
    for (kept, sums, gathers, none), *others in pool.run(train, 2, name, [{**split, **each} for each in policies]):
        assert none == 0
        for plan, (losses, _, others_gathers, again) in zip(policies[1:], others, strict=True):
            assert losses == kept and (again > 0) is recomputes(name, plan)
            assert others_gathers >= gathers if sequence else others_gathers == gathers
        assert [each[1] for each in others[:-2]] == [sums] * 3
        assert all(each[1] > sums for each in others[-2:])


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", by_default(["gpt2", "llama", "t5", "bert"], "t5"))
def test_models_of_transformers(pool: Pool, name: str, zero: int) -> None:
    pytest.importorskip("transformers")
    plan = {"zero": zero, "transport": "network"}
    plans = [{**plan, "activations": each} for each in ("off", "blocks", "sqrt", "selective")]
    for (kept, *_), *others in pool.run(train, 2, name, plans):
        for policy, (losses, _, _, again) in zip(plans[1:], others, strict=True):
            assert losses == kept and (again > 0) is recomputes(name, policy)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_caches_of_keys_and_values_are_not_written_again(pool: Pool, name: str) -> None:
    pytest.importorskip("transformers")
    for (kept, *_), (losses, _, _, again) in pool.run(
        train, 2, name, [{"activations": "off"}, {"activations": "blocks"}], True
    ):
        for found, expected in zip(losses, kept, strict=True):
            assert found == pytest.approx(expected, rel=1e-6)
        assert again > 0


MIXTURES: list[dict[str, Any]] = [
    {},
    {"kind": "starved", "modules": True},
    {"kind": "by row", "modules": True, "checkpointed": True},
]


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("ranks", by_default([2, 4], 2))
@pytest.mark.parametrize("model", by_default(MIXTURES, *MIXTURES[1:]), ids=str)
def test_mixtures_route_as_in_their_forward(pool: Pool, model: dict[str, Any], ranks: int, zero: int) -> None:
    """Experts lie on several ranks, of which some get no tokens; the exchanges are those of the forward again."""
    plan = {"zero": zero, "transport": "network", "expert_parallel": ranks}
    runs = [({"blocks": 4, **model}, {**plan, "activations": each}) for each in ("off", "blocks", "sqrt", "selective")]
    for kept, *others in pool.run(mixed.follow_all, ranks, runs, 2):
        for found in others:
            assert (found["losses"], found["norms"]) == (kept["losses"], kept["norms"])
            assert all(torch.equal(value, kept["weights"][name]) for name, value in found["weights"].items())
            assert found["memory"] == kept["memory"]
