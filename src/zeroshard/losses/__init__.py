"""Losses that never hold the logits: the output layer and its cross entropy together, in chunks of rows.

Read `linear_cross_entropy`, then `row_gradients` for the arithmetic of a chunk. `causal_models` brings the loss into a
model; the output layers of those of transformers return `absent_logits` meanwhile.
"""

from zeroshard.losses.linear_cross_entropy import OutputLayer, default_chunk, linear_cross_entropy

__all__ = ["OutputLayer", "default_chunk", "linear_cross_entropy"]
