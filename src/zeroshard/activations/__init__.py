"""Activations kept elsewhere than on the device (vDNN, 1602.08124)."""

from zeroshard.activations.keep import Keep, Kept
from zeroshard.activations.offload import ActivationStore

__all__ = ["ActivationStore", "Keep", "Kept"]
