"""Claims of Switch Transformers (Fedus et al., 2101.03961, version 3) about parameters and operations, table 9.

The models are T5's, encoder and decoder of as many layers each; feed-forward layers are this package's `MoE` on the
meta device where they have experts. The embedding is that of T5 (32,128 tokens), and is the output layer too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroshard.moe.layer import FeedForward, FeedForwardLayer, MoE
from zeroshard.reproduce.claim import Claim, Reading, Say

PAPER = "Switch Transformers, Fedus et al., 2101.03961v3"
VOCABULARY = 32_128
INPUTS, TARGETS = 512, 114  # tokens of a pre-training sequence of T5: 15 % of the inputs are targets, in spans of 3
HEAD = 64
BILLION = 10**9
OF_OPERATIONS = 0.16  # relative tolerance of the published number, whose way of counting is not given


@dataclass(frozen=True)
class T5Shape:
    """A row of table 9.

    Attributes:
        width: of the model; hidden: of a feed-forward layer; heads: of 64 features each.
        layers: of the encoder, and of the decoder.
        mixtures: feed-forward layers that are mixtures, of `experts` each.
        gated: GEGLU, with a third matrix.
    """

    width: int
    hidden: int
    heads: int
    layers: int
    mixtures: int = 0
    experts: int = 1
    gated: bool = True

    @property
    def parameters(self) -> int:
        """Weights of all matrices; norms and relative positions are left out."""
        attentions = 3 * self.layers  # a decoder layer has two
        dense = 2 * self.layers - self.mixtures
        return (
            VOCABULARY * self.width
            + attentions * self._attention
            + dense * self._network
            + self.mixtures * self._mixture
        )

    @property
    def operations(self) -> int:
        """Multiplications and additions of the forward of a sequence, one expert for each token; routers left out."""
        encoder = INPUTS * (self._attention + self._network)
        decoder = TARGETS * (2 * self._attention + self._network)
        decoder += (INPUTS - TARGETS) * self._attention // 2  # keys and values of the inputs
        scores = self.heads * HEAD * (INPUTS**2 + TARGETS**2 + TARGETS * INPUTS)
        return 2 * (self.layers * (encoder + decoder + 2 * scores) + TARGETS * VOCABULARY * self.width)

    @property
    def _attention(self) -> int:
        return 4 * self.width * self.heads * HEAD

    @property
    def _network(self) -> int:
        return _size(FeedForwardLayer, self.width, self.hidden, self._kind)

    @property
    def _mixture(self) -> int:
        """With its router."""
        return _size(partial(MoE, experts=self.experts, expert=self._kind), self.width, self.hidden)

    @property
    def _kind(self) -> FeedForward:
        return FeedForward(activation="gelu", gated=self.gated)


def _size(make: Callable[..., nn.Module], *shape: Any) -> int:
    """Parameters of a module, made without values."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make(*shape).parameters())


MODELS = {  # with the published parameters and operations in 10^9
    "T5-Base": (T5Shape(768, 2048, 12, 12), "0.2", "124"),
    "Switch-Base": (T5Shape(768, 2048, 12, 12, 12, 128), "7", "124"),
    "T5-Large": (T5Shape(1024, 2816, 16, 24), "0.7", "425"),
    "Switch-Large": (T5Shape(1024, 2816, 16, 24, 24, 128), "26", "425"),
    "T5-XXL": (T5Shape(4096, 10240, 64, 24), "11", "6300"),
    "Switch-XXL": (T5Shape(4096, 10240, 64, 24, 24, 64), "395", "6300"),
    "Switch-C": (T5Shape(2080, 6144, 32, 15, 30, 2048, gated=False), "1571", "890"),
}
NOTES = {"Switch-XXL": "table 9 prints 64 experts; with 128, as in the published checkpoint, it is 395"}


def parameters(say: Say) -> Iterator[Reading]:
    """Of each model."""
    for name, (shape, published, _) in MODELS.items():
        say(name)
        yield Reading(name, published, shape.parameters / BILLION, note=NOTES.get(name, ""))


def operations(say: Say) -> Iterator[Reading]:
    """Of each model, per sequence."""
    for name, (shape, _, published) in MODELS.items():
        say(name)
        yield Reading(name, published, shape.operations / BILLION, within=OF_OPERATIONS)


SWITCH = (
    Claim(
        "switch-parameters",
        "parameters of Switch Transformers compared with dense models of equal operations",
        f"{PAPER}, table 9",
        "10^9 parameters",
        "Matrices are counted, those of mixtures from `zs.moe.MoE` on the meta device.",
        parameters,
    ),
    Claim(
        "switch-operations",
        "operations per sequence do not depend on the number of experts",
        f"{PAPER}, table 9",
        "10^9 operations",
        "Two for each weight that a token meets, in a forward over 512 inputs and 114 targets, scores of attention and "
        "logits included. The paper does not say how it counts; ours is 11 to 15 % higher in each model.",
        operations,
    ),
)
