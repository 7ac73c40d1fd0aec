"""Model states of shared-out experts beside split layers: by the formulas, and in a rehearsal of the engine."""

import pytest
import torch

import zeroshard as zs
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse
from zeroshard.planner.predict.states import sizes_of, states_of

SIZES = {"hidden_size": 32, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
MORE = {"num_key_value_heads": 4, "vocab_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}


def build() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    model: torch.nn.Module = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **MORE))
    return model


def batch(rows: int) -> dict[str, torch.Tensor]:
    words = torch.zeros(rows, 16, dtype=torch.long)
    return {"input_ids": words, "labels": words}


@pytest.mark.parametrize("together, shared", [(4, 2), (2, 4), (4, 1)])
def test_the_formulas_are_near_the_engine(together: int, shared: int) -> None:
    task = TrainingTask(build, batch, torch.optim.AdamW, 4)
    plan = zs.Plan(zero=0, tensor_parallel=together, expert_parallel=shared, transport="network")
    states = states_of(sizes_of(task), plan, 4)
    found = rehearse(task, plan, 0, 4, 4)
    assert 4 * states.trainable == pytest.approx(found.states["parameters"], rel=0.005)  # norms and routers are whole
