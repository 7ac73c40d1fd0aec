"""Causal models of transformers, unmodified, whose logits are not made: losses, gradients, and what is refused."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import PlanError
from zeroshard.losses.causal_models import make_loss_by_chunks, set_loss_chunk
from zeroshard.planner.predict.memory_tracker import Tracker

transformers = pytest.importorskip("transformers")
VOCABULARY = 29
LLAMA = {
    "vocab_size": VOCABULARY, "use_cache": False, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
GPT2 = {
    "vocab_size": VOCABULARY, "use_cache": False, "n_positions": 32, "n_embd": 12, "n_layer": 2, "n_head": 2,
    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
BERT = {**NEOX, "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "gpt2, tied": ("GPT2Config", GPT2),
    "gemma2, tied, capped": ("Gemma2Config", {**LLAMA, "head_dim": 6, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {**LLAMA, "head_dim": 6, "final_logit_softcapping": None}),
    "qwen3": ("Qwen3Config", {**LLAMA, "head_dim": 6}),
    "granite, scaled": ("GraniteConfig", {**LLAMA, "logits_scaling": 3.0}),
    "cohere, scaled": ("CohereConfig", {**LLAMA, "logit_scale": 0.25}),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "bert, biased": ("BertConfig", BERT),
    "gpt-neox": ("GPTNeoXConfig", NEOX),
}


def pair(name: str) -> tuple[Any, Any]:
    """A model, and one of the same weights that makes no logits."""
    kind, settings = CONFIGS[name]
    plain = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings))
    chunked = copy.deepcopy(plain)
    set_loss_chunk(chunked, 7)
    return plain, chunked


def words() -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which some do not count."""
    tokens = torch.randint(2, VOCABULARY, (3, 10))
    labels = tokens.clone()
    labels[0, :4] = -100
    return tokens, labels


@pytest.mark.parametrize("counted", [None, 50, torch.tensor(50)], ids=["mean", "number", "tensor"])
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_the_plain_model(name: str, counted: Any) -> None:
    plain, chunked = pair(name)
    tokens, labels = words()
    given = {} if counted is None else {"num_items_in_batch": counted}
    losses = [model(input_ids=tokens, labels=labels, **given).loss for model in (plain, chunked)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for (path, expected), found in zip(plain.named_parameters(), chunked.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=2e-7, msg=path)


@pytest.mark.parametrize("name", CONFIGS)
def test_without_labels_logits_are_made(name: str) -> None:
    plain, chunked = pair(name)
    tokens, labels = words()
    chunked(input_ids=tokens, labels=labels)
    with torch.no_grad():
        assert torch.equal(chunked(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_labels_by_place_and_in_evaluation() -> None:
    plain, chunked = pair("llama")
    tokens, labels = words()
    before_labels = (tokens, None, None, None, None)
    with torch.no_grad():
        losses = [model(*before_labels, labels).loss for model in (plain.eval(), chunked.eval())]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    assert not losses[1].requires_grad


def test_the_logits_are_never_made() -> None:
    wide = [transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "vocab_size": 4096})) for _ in range(2)]
    set_loss_chunk(wide[1], 8)
    tokens, _ = words()
    tokens, peaks = tokens.repeat(10, 1), []
    for model in wide:
        with Tracker() as tracker:
            model(input_ids=tokens, labels=tokens).loss.backward()
        peaks.append(tracker.peak.nbytes)
    assert peaks[0] - peaks[1] > tokens.numel() * 4096 * 4  # and the largest of what is made of them


@pytest.mark.parametrize("use", ["[0]", ".argmax(-1)", " + 1", ".softmax(-1)", " * torch.ones(1)", ".view(-1)"])
def test_reading_logits_that_were_not_made_says_how_to_get_them(use: str) -> None:
    _, chunked = pair("llama")
    tokens, labels = words()
    logits = chunked(input_ids=tokens, labels=labels).logits
    assert logits.shape == (3, 10, VOCABULARY) and logits.device == tokens.device
    with pytest.raises(PlanError, match=r"logits were read.*leave the labels out of the batch"):
        eval(f"logits{use}", {"logits": logits, "torch": torch})
    with pytest.raises(PlanError, match="logits were read"):
        torch.nn.functional.cross_entropy(logits, labels)


def test_logits_that_are_kept_hold_no_graph() -> None:
    _, chunked = pair("llama")
    tokens, labels = words()
    assert chunked(input_ids=tokens, labels=labels).logits.call.hidden is None
    with pytest.raises(IndexError):
        chunked(input_ids=tokens + VOCABULARY, labels=labels)
    assert torch.is_tensor(chunked(input_ids=tokens).logits)


def test_copies_are_plain_models() -> None:
    plain, chunked = pair("llama")
    tokens, labels = words()
    file = io.BytesIO()
    torch.save(chunked, file)
    file.seek(0)
    for copied in (copy.deepcopy(chunked), torch.load(file, weights_only=False)):
        output = copied(input_ids=tokens, labels=labels)
        assert torch.equal(output.logits, plain(input_ids=tokens).logits)
        set_loss_chunk(copied, 5)
        assert copied(input_ids=tokens, labels=labels).loss.item() == pytest.approx(output.loss.item(), rel=1e-6)


class Reads(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined,valid-type]
    """Does something to its logits between the output layer and the loss."""

    def __init__(self, config: Any, done: Any) -> None:
        super().__init__(config)
        self.done = done

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.done(self.lm_head(self.model(input_ids=input_ids)[0]))
        return self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    "done",
    [
        lambda z: z.masked_fill(torch.zeros(1, dtype=torch.bool), 0.0),
        lambda z: z[:, -3:],
        lambda z: torch.where(z > 0, z, -z),
        lambda z: z * torch.ones(VOCABULARY),
        lambda z: z.tanh().tanh(),
        lambda z: z / 0,
    ],
    ids=["mask", "slice", "where", "times a tensor", "tanh twice", "by 0"],
)
def test_a_model_that_computes_with_its_logits_is_refused(done: Any) -> None:
    model = Reads(transformers.LlamaConfig(**LLAMA), done)
    make_loss_by_chunks(model, 7)
    with pytest.raises((PlanError, TypeError), match=r"logits were read|not supported between"):
        model(*words())


def test_scales_and_caps_in_any_form_are_followed() -> None:
    for done in (lambda z: 0.5 * z, lambda z: 3 * torch.tanh(z.float() / 6) * 2, lambda z: (z * 2).tanh() / 4):
        plain = Reads(transformers.LlamaConfig(**LLAMA), done)
        chunked = copy.deepcopy(plain)
        make_loss_by_chunks(chunked, 7)
        tokens, labels = words()
        torch.testing.assert_close(chunked(tokens, labels), plain(tokens, labels), rtol=1e-6, atol=0)


def test_labels_of_other_positions_are_refused() -> None:
    _, chunked = pair("llama")
    tokens, labels = words()
    with pytest.raises(PlanError, match=r"labels have shape \(3, 10\).*no logits_to_keep"):
        chunked(input_ids=tokens, labels=labels, logits_to_keep=3)


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=29, d_model=12, d_kv=6, d_ff=20, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    )


def test_models_with_a_loss_of_their_own_are_refused_by_name() -> None:
    model = t5()
    set_loss_chunk(model, 7)
    with pytest.raises(PlanError, match=r"logits were read \(view\).*if the model itself reads them, leave loss_chunk"):
        model(input_ids=words()[0], labels=words()[0])
    _, other = pair("llama")
    other.loss_function = lambda logits, labels, **rest: logits.sum()
    other.lm_head = nn.Linear(12, VOCABULARY, bias=False)
    with pytest.raises(PlanError, match=r"stands in for the loss function ForCausalLMLoss .* LlamaForCausalLM has"):
        set_loss_chunk(other, 7)


def test_other_models_are_refused_when_the_engine_is_made() -> None:
    sgd = torch.optim.SGD
    with pytest.raises(PlanError, match=r"loss_chunk=4 is for causal language models .* and Sequential is neither"):
        zs.Engine(nn.Sequential(nn.Linear(2, 2)), lambda p: sgd(p, lr=0.1), zs.Plan(loss_chunk=4), mesh=zs.Mesh())
    plain, _ = pair("llama")
    plain.lm_head = nn.Sequential(nn.Linear(12, VOCABULARY))
    with pytest.raises(PlanError, match=r"output layer that is a plain nn.Linear.* is a Sequential"):
        zs.Engine(plain, lambda p: sgd(p, lr=0.1), zs.Plan(loss_chunk=4), mesh=zs.Mesh())


class Around(nn.Module):
    """A user's own module around a causal model, whose attributes it passes on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, labels=labels).loss


def wrapped(kind: str) -> nn.Module:
    """A causal model in a wrapper."""
    model, _ = pair("llama")
    if kind == "own":
        return Around(model)
    peft = pytest.importorskip("peft")
    given = {"target_modules": "all-linear"} if kind == "peft" else {"target_modules": ["lm_head", "q_proj"]}
    if kind == "peft, trained head":
        given = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **given))


@pytest.mark.parametrize("kind", ["own", "peft", "peft, trained head"])
def test_models_in_wrappers_make_their_loss_by_chunks(kind: str) -> None:
    plain = wrapped(kind)
    chunked = copy.deepcopy(plain)
    set_loss_chunk(chunked, 7)
    tokens, labels = words()
    if kind == "own":
        losses = [model(tokens, labels) for model in (plain, chunked)]
    else:
        outputs = [model(input_ids=tokens, labels=labels) for model in (plain, chunked)]
        losses = [output.loss for output in outputs]
        assert not isinstance(outputs[1].logits, Tensor)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for (path, expected), found in zip(plain.named_parameters(), chunked.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None), path
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=2e-7, msg=path)


def test_an_adapter_on_the_output_layer_is_refused_by_its_class() -> None:
    with pytest.raises(PlanError, match=r"is a peft\.tuners\.lora\.layer\.Linear.*modules_to_save"):
        set_loss_chunk(wrapped("peft on the head"), 7)


def test_none_leaves_the_model_as_it_is() -> None:
    plain, _ = pair("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_loss_chunk(plain, None)
    assert "forward" not in vars(plain.lm_head)
