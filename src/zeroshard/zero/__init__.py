"""ZeRO data parallelism (Rajbhandari et al., 1910.02054): stages 0 to 3 as one mechanism.

A stage only says which states a rank keeps (`residency`); gathering, freeing and reducing are the same code for all.
Read `residency`, `weights`, `gradients` (`buffer`, `reduce`, `sums`), then the order in which units are gathered
(`gatherer`, `gather_order`) and reduced (`reductions`), then `byte_formulas`.
"""

from zeroshard.zero.byte_formulas import StateBytes, state_bytes, wire_elements
from zeroshard.zero.gather_order import ByChunk, ByPass
from zeroshard.zero.gradients import Accumulation, BufferedGradients
from zeroshard.zero.residency import Residency

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
