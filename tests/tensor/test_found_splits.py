"""Models of every family, cut as they are found, beside the whole ones: the same loss and the same gradients."""

import copy
import re
from typing import Any

import pytest
import torch
from pool import Pool
from split_models.small_models import VOCABULARY, family
from split_models.split_decoder import part_of
from torch import Tensor

import zeroshard as zs
from zeroshard.comm.collectives import Comm
from zeroshard.parts.place import Axis, Partial
from zeroshard.tensor.policy import TensorParallel
from zeroshard.tensor.split.collectives import TensorRanks
from zeroshard.tensor.split.technique import TensorTechnique

ROWS, POSITIONS = 2, 8
KEY_BIAS = re.compile(r"k(ey|_proj)\.bias$")
QUIET = {  # without dropout
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}


def batch(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(3, VOCABULARY, (2, ROWS, POSITIONS), generator=generator)
    if name == "gpt":
        return {"tokens": tokens, "targets": labels}
    more = {"decoder_input_ids": tokens.flip(1)} if name == "t5" else {}
    return {"input_ids": tokens, "labels": labels, **more}


def loss_of(model: Any, name: str) -> Tensor:
    output = (
        model(**batch(name))
        if name == "gpt"
        else model(**batch(name), **({} if name == "bert" else {"use_cache": False}))
    )
    return output if isinstance(output, Tensor) else output.loss


def compare(
    mesh: zs.Mesh,
    name: str,
    changes: dict[str, Any],
    sequence: bool,
    shared: tuple[str, ...] = (),
    scaled: tuple[str, ...] = (),
) -> list[str]:
    """Names of gradients that differ, and what was split.

    Args:
        shared: layers whose weight all blocks have in common.
        scaled: parameters with a hook on their gradient.
    """
    torch.manual_seed(0)
    whole: Any = family(name, device="cpu", **{**QUIET.get(name, {}), **changes})
    for path in shared:
        for block in whole.model.layers[1:]:
            block.get_submodule(path).weight = whole.model.layers[0].get_submodule(path).weight
    split = copy.deepcopy(whole)
    for parameter in (model.get_parameter(path) for model in (whole, split) for path in scaled):
        parameter.register_hook(lambda gradient: gradient * 0.3)
    axis = Axis("tensor", (tuple(range(mesh.ranks)),), Comm(mesh))
    ranks = TensorRanks(axis)
    technique = TensorTechnique(TensorParallel(mesh.ranks, sequence=sequence))
    places = technique.cut(split, {"tensor": axis})
    expected, found = loss_of(whole, name), loss_of(split, name)
    expected.backward()
    found.backward()
    differing = [] if torch.allclose(expected, found, rtol=1e-5) else [f"loss {float(expected)} {float(found)}"]
    parts = dict(split.named_parameters())
    for path, parameter in whole.named_parameters():
        part = parts[path]
        assert part.grad is not None and parameter.grad is not None, path
        if isinstance(places.get(part), Partial):
            ranks.sum(part.grad, path)
        wanted = part_of(parameter.grad, places.get(part))
        if KEY_BIAS.search(path):  # has no gradient but rounding
            continue
        if not torch.allclose(part.grad, wanted, rtol=1e-4, atol=1e-5 * float(parameter.grad.abs().max())):
            differing.append(path)
    return differing


CASES: list[tuple[str, dict[str, Any], int]] = [
    *(
        (name, {}, 2)
        for name in ("gpt", "gpt2", "qwen3", "gemma2", "phi3", "falcon", "falcon-heads", "opt", "bert", "t5")
    ),
    *(("llama", {"num_key_value_heads": n, "attention_bias": n == 1}, 4) for n in (1, 2, 4)),
    *(("falcon-groups", {"bias": True}, ranks) for ranks in (2, 4)),
    ("gpt2", {"attn_implementation": "eager"}, 4),
    ("phi3", {}, 4),
    ("t5", {"feed_forward_proj": "gated-gelu"}, 4),
    ("falcon", {"alibi": True}, 2),
]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name, changes, ranks", CASES)
def test_families_as_they_are_found(pool: Pool, name: str, changes: dict[str, Any], ranks: int, sequence: bool) -> None:
    assert pool.run(compare, ranks, name, changes, sequence) == [[]] * ranks


@pytest.mark.parametrize("sequence", [False, True])
def test_weights_that_blocks_share(pool: Pool, sequence: bool) -> None:
    shared = ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj")
    assert pool.run(compare, 2, "llama", {}, sequence, shared) == [[], []]


def test_hooks_of_parameters_are_those_of_their_parts(pool: Pool) -> None:
    scaled = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight")
    assert pool.run(compare, 2, "llama", {}, True, (), scaled) == [[], []]
