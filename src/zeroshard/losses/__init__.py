"""Losses that never hold the logits: the output layer and its cross entropy together, in chunks of rows.

Read `linear_cross_entropy`, then `row_gradients` for the arithmetic of a chunk.
"""

from zeroshard.losses.linear_cross_entropy import OutputLayer, linear_cross_entropy

__all__ = ["OutputLayer", "linear_cross_entropy"]
