"""Hugging Face models by tokens: `num_items_in_batch` in the batch makes their loss a sum, and labels are its count."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.test_transformers_models import LLAMA, TEXT, VOCABULARY, gpt2, llama
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import BatchError
from zeroshard.losses.labels import calls_loss_function
from zeroshard.step.batch import loss_of

transformers = pytest.importorskip("transformers")
SGD = partial(torch.optim.SGD, lr=0.1)
PLANS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero": 1, "microbatches": 2},
    "zero 3": {"zero": 3, "transport": "network"},
    "zero 3 in chunks": {"zero": 3, "loss_chunk": 7},
    "1f1b": {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", "microbatches": 2},
    "1f1b in chunks": {
        "pipeline_parallel": 2,
        "pipeline_parallel.balance": "parameters",
        "microbatches": 2,
        "loss_chunk": 7,
    },
}
BART = transformers.BartConfig(vocab_size=VOCABULARY, d_model=16, decoder_layers=1, encoder_layers=1,
                               decoder_attention_heads=2, decoder_ffn_dim=16, max_position_embeddings=16)  # fmt: skip
MAKERS = {"gpt2": gpt2, "llama": llama}


def rows(step: int, data_rank: int = 0, data_ranks: int = 1) -> dict[str, Any]:
    """A padded batch; the first data rank of two has two of the eight rows, of which one has no label."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(2, VOCABULARY, (8, 10), generator=generator)
    ends = torch.randint(2, 11, (8, 1), generator=generator)
    labels = tokens.masked_fill(torch.arange(10) >= ends, -100)
    labels[0] = -100
    batch = {"input_ids": tokens, "labels": labels, "attention_mask": (torch.arange(10) < ends).long()}
    sizes = [8] if data_ranks == 1 else [2, 6]
    return {name: tensor.split(sizes)[data_rank] for name, tensor in batch.items()}


def seeded(name: str) -> Any:
    torch.manual_seed(0)
    return MAKERS[name]()


def train(mesh: zs.Mesh, name: str, plan: str) -> Any:
    """Two steps of `train_step`, and where there is one stage one by hand."""
    engine = zs.Engine(seeded(name), SGD, zs.Plan.from_dict(PLANS[plan]), mesh=mesh,
                       example={**rows(0), "num_items_in_batch": 1})  # fmt: skip
    losses = []
    for step in range(3):
        batch = {**rows(step, engine.data_rank, engine.data_ranks), "num_items_in_batch": step + 1}
        if step < 2 or engine.plan.pipelined:
            result = engine.train_step(batch)
        else:
            output = engine(**batch)
            engine.backward(output.loss * 3, count=(batch["labels"][:, 1:] != -100).sum())
            result = engine.step()
        assert result.loss is not None
        losses.append(result.loss.item())
    return losses, engine.state_dict()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MAKERS)
def test_every_label_weighs_the_same(pool: Pool, name: str, plan: str) -> None:
    model, losses = seeded(name), []
    optimizer = SGD(model.parameters())
    for step in range(3):
        loss = model(**rows(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, weights in pool.run(train, 2, name, plan):
        assert found == pytest.approx(losses, rel=2e-6)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_the_balance_loss_of_a_mixture_is_a_penalty() -> None:
    config = transformers.MixtralConfig(**TEXT, **LLAMA, num_local_experts=4, output_router_logits=True)
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    batch = rows(0)
    wanted = model(**batch).loss
    output = model(**batch, num_items_in_batch=5)
    assert output.aux_loss > 0
    loss = loss_of(model, output, {**batch, "num_items_in_batch": 5})
    assert isinstance(loss.items, Tensor) and loss.items == (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(loss.value / loss.items, wanted)


SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def small(name: str) -> Any:
    kind = getattr(transformers, name)
    return kind(kind.config_class(vocab_size=VOCABULARY, pad_token_id=0, **SMALL))


def test_labels_are_those_of_the_loss_function() -> None:
    labels = torch.tensor([[1, 2, -100], [-100, 3, 4]])
    output, batch = SimpleNamespace(loss=torch.tensor(2.0)), {"labels": labels, "num_items_in_batch": 5}
    counts = {"LlamaForCausalLM": 3, "ModernBertForMaskedLM": 4, "LlamaForTokenClassification": 4}
    for name, count in counts.items():
        loss = loss_of(small(name), output, batch)
        assert (loss.value, loss.items) == (10.0, count), name
    model = small("LlamaForCausalLM")
    assert loss_of(model, output, {**batch, "shift_labels": labels}).items == 4
    assert loss_of(model, output, {"labels": labels})[:2] == (2.0, None)
    for other, given in ((nn.Linear(1, 1), batch), (model, {"num_items_in_batch": 5})):
        with pytest.raises(BatchError, match=r"num_items_in_batch, whose labels are not known .* to \(sum, count\)"):
            loss_of(other, output, given)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForTokenClassification", "BartForCausalLM"])
def test_a_model_that_leaves_the_argument_aside_is_refused(name: str) -> None:
    model = transformers.BartForCausalLM(BART) if name == "BartForCausalLM" else small(name)
    batch = {"input_ids": torch.tensor([[1, 2, 1]]), "labels": torch.tensor([[1, 1, -100]])}
    means = [model.eval()(**batch, num_items_in_batch=items).loss for items in (1, 5)]
    torch.testing.assert_close(*means)
    engine = zs.Engine(model, SGD, zs.Plan())
    with pytest.raises(BatchError, match=f"num_items_in_batch, which {name} leaves aside: .* Leave the argument out"):
        engine.train_step({**batch, "num_items_in_batch": 5})


def test_wrapped_models_are_asked_inside() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(small("LlamaForCausalLM"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    batch = {"input_ids": torch.tensor([[1, 2, 1]]), "labels": torch.tensor([[1, 1, -100]]), "num_items_in_batch": 5}
    loss = loss_of(model, model(**batch), batch)
    assert loss.items == 1
    assert not calls_loss_function(small("BertForMaskedLM")) and calls_loss_function(model)


def masked(mesh: zs.Mesh, form: str, zero: int) -> Any:
    """A step in which the second rank has no label, in one of the forms of a loss by sum; and one without it."""
    engine = zs.Engine(seeded("llama"), SGD, zs.Plan(zero=zero), mesh=mesh)
    batch = rows(0)
    if mesh.rank == 1:
        batch["labels"] = torch.full_like(batch["labels"], -100)
    count = (batch["labels"][:, 1:] != -100).sum()
    if form == "items":
        result = engine.train_step({**batch, "num_items_in_batch": count})
    else:
        engine.backward(engine(**batch).loss * count, count)
        result = engine.step()
    return result.loss, engine.state_dict()


@pytest.mark.parametrize("form, zero", [("items", 2), ("mean times count", 3)])
def test_a_rank_without_labels_counts_zero(pool: Pool, form: str, zero: int) -> None:
    model = seeded("llama")
    loss = model(**rows(0)).loss
    loss.backward()
    SGD(model.parameters()).step()
    for found, state in pool.run(masked, 2, form, zero):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
        for name, values in model.state_dict().items():
            torch.testing.assert_close(state[name], values, rtol=1e-4, atol=1e-6)
