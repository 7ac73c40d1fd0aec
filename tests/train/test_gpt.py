"""The built-in model: its shape, its causality, its initialisation module by module."""

import math
from operator import methodcaller

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.errors import DataError, ModelError
from zeroshard.train.gpt import GPT, generate, rotate
from zeroshard.train.sizes import SIZES, GPTConfig

CONFIG = GPTConfig(vocabulary=50, context=16, width=24, heads=3, layers=2)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def tokens_of(batch: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(CONFIG.vocabulary, (batch, time), generator=torch.Generator().manual_seed(seed))


def test_a_token_changes_no_logits_before_it(model: GPT) -> None:
    tokens = tokens_of(2, 16)
    logits = model(tokens)
    assert logits.shape == (2, 16, CONFIG.vocabulary)
    for place in (0, 7, 15):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % CONFIG.vocabulary
        other = model(changed)
        torch.testing.assert_close(other[:, :place], logits[:, :place])
        assert not torch.allclose(other[:, place], logits[:, place])


def test_the_loss_is_the_mean_negative_log_likelihood(model: GPT) -> None:
    tokens, targets = tokens_of(3, 9), tokens_of(3, 9, seed=1)
    probabilities = model(tokens).double().softmax(dim=-1)
    expected = -probabilities.gather(-1, targets[..., None]).log().mean()
    torch.testing.assert_close(model(tokens, targets).double(), expected)


def test_the_loss_of_any_chunk_is_that_of_the_logits(model: GPT) -> None:
    tokens, targets = tokens_of(3, 9), tokens_of(3, 9, seed=1)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    for chunk in (None, 1, 5):
        model.head.loss_chunk = chunk
        loss = model(tokens, targets)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for found, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_the_loss_is_float32_in_a_bfloat16_model(model: GPT) -> None:
    half = model.bfloat16()
    assert half(tokens_of(1, 4)).dtype == torch.bfloat16
    assert half(tokens_of(1, 4), tokens_of(1, 4)).dtype == torch.float32


@pytest.mark.parametrize("config", [CONFIG, *SIZES.values()], ids=["test", *SIZES])
def test_parameters_are_those_of_the_shape(config: GPTConfig) -> None:
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in GPT(config).parameters())
    width, layers = config.width, config.layers
    assert counted == config.vocabulary * width + layers * (12 * width**2 + 2 * width) + width


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", 1.02), ("small", 3.0), ("medium", 10.0), ("gpt2", 124.0), ("gpt2-xl", 1557.0)]
)
def test_sizes_are_what_their_table_promises(name: str, millions: float) -> None:
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in GPT(SIZES[name]).parameters())
    assert counted / 1e6 == pytest.approx(millions, rel=0.05)


def test_a_meta_model_is_materialised_module_by_module(model: GPT) -> None:
    with torch.device("meta"):
        empty = GPT(CONFIG)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not list(empty.buffers())
    empty = empty.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(math.nan)
    for module in empty.modules():
        if list(module.parameters(recurse=False)):
            methodcaller("reset_parameters")(module)
    empty.head.weight = empty.embedding.weight
    assert {name: p.shape for name, p in empty.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(parameter.isfinite().all() for parameter in empty.parameters())
    assert torch.isfinite(empty(tokens_of(1, 8), tokens_of(1, 8)))


def test_initial_values_have_the_spread_of_gpt2() -> None:
    torch.manual_seed(0)
    layers = 3
    model = GPT(GPTConfig(vocabulary=200, context=8, width=128, heads=4, layers=layers))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        residual = name.endswith(("output.weight", "down.weight"))
        expected = 0.02 / math.sqrt(2 * layers) if residual else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(parameter.mean().item()) < expected / 20, name
    tokens = torch.randint(200, (4, 8), generator=torch.Generator().manual_seed(0))
    assert model(tokens, tokens.roll(1)).item() == pytest.approx(math.log(200), abs=0.2)


def test_output_and_embedding_are_one_parameter(model: GPT) -> None:
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_rotation_keeps_lengths_and_shows_only_distances() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 12, 8)  # the same vector at every position
    turned_query, turned_key = rotate(query), rotate(key)
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1))
    scores = (turned_query @ turned_key.mT)[0, 0]
    for distance in range(1, 12):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    pair = torch.view_as_complex(torch.stack(query.chunk(2, dim=-1), dim=-1).contiguous())
    angle = torch.outer(torch.arange(12.0), 10_000.0 ** (-torch.arange(4.0) / 4))
    expected = pair * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned_query, torch.cat((expected.real, expected.imag), dim=-1))


def test_dropout_acts_only_in_training() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=50, context=16, width=24, heads=3, layers=1, dropout=0.5))
    tokens = tokens_of(1, 8)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_few_steps_learn_a_cycle() -> None:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    cycle = torch.arange(40).remainder(5)[None]
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(cycle[:, :-1], cycle[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert generate(model, [3, 4, 0], 6, temperature=0.0) == [1, 2, 3, 4, 0, 1]


def test_heads_must_share_the_width() -> None:
    with pytest.raises(ModelError, match="width of 20 does not give 3 heads an even size each; choose a multiple of 6"):
        GPTConfig(vocabulary=50, context=16, width=20, heads=3, layers=1)


def test_sampling_follows_the_logits() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])

    def model(tokens: Tensor) -> Tensor:
        return logits.expand(1, tokens.shape[1], 4)

    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor(generate(model, [0], 4000, temperature=2.0, top_k=3, generator=generator, context=1))
    frequency = torch.bincount(drawn, minlength=4) / 4000
    expected = F.softmax(torch.tensor([0.0, 0.5, 1.0, -math.inf]), dim=0)
    torch.testing.assert_close(frequency, expected, atol=0.03, rtol=0.0)
    assert generate(model, [0], 3, temperature=1e-45, top_k=2, generator=generator) == [2, 2, 2]  # as at 0
    assert len(generate(model, [0], 3, temperature=math.inf, top_k=2, generator=generator)) == 3


def test_generation_gives_the_model_what_it_can_take() -> None:
    seen: list[list[int]] = []

    def model(tokens: Tensor) -> Tensor:
        seen.extend(tokens.tolist())
        return F.one_hot((tokens + 1) % 10, 10).float()

    assert generate(model, [1, 2], 3, temperature=0.0, context=3) == [3, 4, 5]
    assert seen == [[1, 2], [1, 2, 3], [2, 3, 4]]
    with pytest.raises(DataError, match="prompt is empty"):
        generate(model, [], 3)
