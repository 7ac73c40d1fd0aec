"""Losses without whole logits: the output layer and its cross entropy are fused, in chunks of rows.

Read `linear_cross_entropy`, then `row_gradients` for the arithmetic of a chunk. `causal_models` installs the loss in a
model; output layers of transformers then return `absent_logits`.
"""

from zeroshard.losses.linear_cross_entropy import OutputLayer, default_chunk, linear_cross_entropy

__all__ = ["OutputLayer", "default_chunk", "linear_cross_entropy"]


def __dir__() -> list[str]:
    """Only the public names."""
    return sorted(__all__)
