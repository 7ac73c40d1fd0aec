"""Activations: where tensors saved for backward are kept (vDNN, 1602.08124).

Read `keep` (on the device, as autograd does) and `offload` (in host memory until the backward reads them).
"""

from zeroshard.activations.keep import Keep, Kept
from zeroshard.activations.offload import ActivationStore

__all__ = ["ActivationStore", "Keep", "Kept"]
