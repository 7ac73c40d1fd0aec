"""Linear layers of torch and transformers: their features, and whether their forward is the plain one."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from zeroshard.quantized.weights import has_quantized

CONV1D = "transformers.pytorch_utils.Conv1D"  # a linear layer with a weight [I, O]
PLAIN = frozenset({CONV1D, "transformers.models.falcon.modeling_falcon.FalconLinear"})  # x W and a bias, no more


@dataclass(frozen=True, slots=True)
class LinearFeatures:
    """The features of a linear layer.

    Attributes:
        inputs: features of its input, I.
        outputs: features of its output, O.
        dimension: that of its weight along which output features lie: 0 for [O, I], 1 for [I, O].
    """

    inputs: int
    outputs: int
    dimension: int


def class_path(module: nn.Module) -> str:
    """The full name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def linear_features(module: nn.Module) -> LinearFeatures | None:
    """The features of a linear layer that can be split; None for anything else, which `why_no_linear` explains."""
    return None if why_no_linear(module) else _features(module)


def why_no_linear(module: nn.Module) -> str:
    """Why a module cannot be split as a linear layer; "" if it can."""
    kind = type(module).__name__
    if not isinstance(module, nn.Linear) and class_path(module) != CONV1D:
        return f"{kind} is no linear layer"
    if has_quantized(module):
        return f"this {kind} has a quantised weight, and its blocks are not divided among ranks"
    if not (class_path(module) in PLAIN or getattr(type(module), "forward", None) is nn.Linear.forward):
        return f"{kind} has a forward of its own, so that what it does with its weight is not known"
    if parametrize.is_parametrized(module) or set(dict(module.named_parameters())) - {"weight", "bias"}:
        return f"this {kind} computes its weight from other parameters"
    return ""


def _features(module: Any) -> LinearFeatures:
    dimension = int(class_path(module) == CONV1D)
    weight = module.weight
    return LinearFeatures(int(weight.shape[1 - dimension]), int(weight.shape[dimension]), dimension)
