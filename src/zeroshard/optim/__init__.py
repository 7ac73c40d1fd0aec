"""Optimizers: any elementwise `torch.optim` optimizer, run on slices of flat buffers (1910.02054, section 5.1).

Read `probe` (whether an optimizer treats each element alone), `spans` (its parameters as slices), `updater`.
"""

from zeroshard.optim.probe import StateLayout, check_elementwise, fresh_state
from zeroshard.optim.spans import SliceSpan, SpanOptimizer

__all__ = ["SliceSpan", "SpanOptimizer", "StateLayout", "check_elementwise", "fresh_state"]
