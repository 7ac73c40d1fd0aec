"""Optimizers: any elementwise `torch.optim` optimizer, run on slices of flat buffers (1910.02054, section 5.1).

`trial` tests whether an optimizer is elementwise; `slices` steps over slices of flats, or over whole tensors, each on
one owner rank; `states` reads states by parameter and from checkpoints; `host` updates on CPUs, in memory and
offloaded. `algorithms` are the package's own optimizers, which run in a plain loop too.
"""

from zeroshard.optim.algorithms.adafactor import Adafactor
from zeroshard.optim.algorithms.adam8bit import Adam8bit, AdamW8bit
from zeroshard.optim.algorithms.lamb import LAMB
from zeroshard.optim.algorithms.muon import Muon, muon_groups
from zeroshard.optim.algorithms.shampoo import SOAP, Shampoo
from zeroshard.optim.algorithms.sm3 import SM3
from zeroshard.optim.host.adam import fast_on_cpus
from zeroshard.optim.slices.collective_spans import Steps, spans_of
from zeroshard.optim.slices.owners import Owners, deal_out
from zeroshard.optim.slices.spans import SliceSpan, SpanOptimizer
from zeroshard.optim.states.between_steps import BetweenSteps
from zeroshard.optim.states.by_parameter import members_of
from zeroshard.optim.trial.probe import check_elementwise, layout_of
from zeroshard.optim.trial.probe_optimizers import StateLayout, fresh_state

__all__ = [
    "LAMB",
    "SM3",
    "SOAP",
    "Adafactor",
    "Adam8bit",
    "AdamW8bit",
    "BetweenSteps",
    "Muon",
    "Owners",
    "Shampoo",
    "SliceSpan",
    "SpanOptimizer",
    "StateLayout",
    "Steps",
    "check_elementwise",
    "deal_out",
    "fast_on_cpus",
    "fresh_state",
    "layout_of",
    "members_of",
    "muon_groups",
    "spans_of",
]


def __dir__() -> list[str]:
    """Only the optimizers and their helpers, which docs/api.md describes."""
    internal = ("BetweenSteps", "Owners", "SliceSpan", "SpanOptimizer", "StateLayout", "Steps", "check_elementwise")
    return sorted({*__all__} - {*internal, "deal_out", "fresh_state", "layout_of", "members_of", "spans_of"})
