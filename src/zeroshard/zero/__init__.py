"""ZeRO data parallelism (Rajbhandari et al., 1910.02054): stages 0 to 3 as one mechanism.

The stage only answers who keeps what (`residency`); gathering, freeing and reducing are the same code for all.
Read `residency`, `parameters`, `gradients`, `order`, then `formulas`.
"""

from zeroshard.zero.formulas import StateBytes, state_bytes, wire_elements
from zeroshard.zero.gradients import Accumulation, GradientShards
from zeroshard.zero.order import Gatherer, PassKind
from zeroshard.zero.parameters import ParameterShards
from zeroshard.zero.residency import Residency

__all__ = [
    "Accumulation",
    "Gatherer",
    "GradientShards",
    "ParameterShards",
    "PassKind",
    "Residency",
    "StateBytes",
    "state_bytes",
    "wire_elements",
]
