"""The package's own optimizers, each by the formulas of its paper, over `tensor_optimizer`."""
