"""Autograd helpers: memory into which the gradient of one parameter is written, row by row for embeddings.

Read `gradient_slot`, then `embeddings`.
"""
