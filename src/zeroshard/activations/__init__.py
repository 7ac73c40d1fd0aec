"""Activations kept elsewhere than on the device (vDNN, 1602.08124)."""

from zeroshard.activations.offload import ActivationStore, Kept

__all__ = ["ActivationStore", "Kept"]
