"""Optimizer states: by the user's parameters, between steps, and in checkpoints."""
