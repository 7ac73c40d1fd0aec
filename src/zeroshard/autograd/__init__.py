"""Autograd helpers: where the gradient of one parameter is written, and gradients that are computed later.

Read `gradient_slot`, then `embeddings` and `deferred_gradients`.
"""
