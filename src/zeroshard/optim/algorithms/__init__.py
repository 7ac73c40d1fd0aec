"""Optimizers of our own, each in the formulas of its paper, over `tensor_optimizer`."""
