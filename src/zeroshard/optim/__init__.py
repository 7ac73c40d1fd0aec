"""Any elementwise `torch.optim` optimizer, run on slices of flat buffers."""

from zeroshard.optim.probe import StateLayout, check_elementwise, fresh_state
from zeroshard.optim.spans import Span, SpanOptimizer

__all__ = ["Span", "SpanOptimizer", "StateLayout", "check_elementwise", "fresh_state"]
