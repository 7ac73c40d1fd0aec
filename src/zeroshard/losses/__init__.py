"""Losses that never hold the logits: the output layer and its cross entropy together, in chunks of rows.

Read `linear_cross_entropy`, then `row_gradients` for the arithmetic of a chunk. `heads` brings the loss into a model:
`causal_models` into those of transformers, whose output layer returns `absent_logits` meanwhile.
"""

from zeroshard.losses.linear_cross_entropy import OutputLayer, default_chunk, linear_cross_entropy

__all__ = ["OutputLayer", "default_chunk", "linear_cross_entropy"]
