"""ZeRO data parallelism (Rajbhandari et al., 1910.02054): stages 0 to 3 as one mechanism.

A stage only selects the states that a rank keeps (`residency`); gathering, freeing and reducing are the same code.
Read `residency`; `weights`; `gradients` and their states, `grad_attribute`, `reduce` (reductions and sums); the orders
in which units are gathered (`gather_order`) and, in `step.backward`, reduced; `byte_formulas`.
"""

from zeroshard.zero.byte_formulas import StateBytes, state_bytes, wire_elements
from zeroshard.zero.gather_order import ByPass
from zeroshard.zero.gradients import Accumulation, BufferedGradients
from zeroshard.zero.residency import Residency
from zeroshard.zero.weights import ByChunk

__all__ = [
    "Accumulation",
    "BufferedGradients",
    "ByChunk",
    "ByPass",
    "Residency",
    "StateBytes",
    "state_bytes",
    "wire_elements",
]
