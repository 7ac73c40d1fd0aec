"""Optimizers: any elementwise `torch.optim` optimizer, run on slices of flat buffers (1910.02054, section 5.1).

Read `probe` (whether an optimizer treats each element alone) over `dependence` (which data reach it, by `data_flow`),
`spans` (its parameters as slices), `held_tensors`, `updater`; for those that need whole tensors, `owners` (which rank
has which), `joined` (where layers are split among ranks), `row_spans` over `asks` (where ranks have rows of a large
matrix), both `collective_spans`, and `whole_states`; for the user's view, `between_steps` and `by_parameter`. Adam on
CPUs, in memory and offloaded, is `in_memory` over `host_adam` with its `kernel`. Optimizers of its own, which run in a
plain loop too, have a module each, over `tensor_optimizer`; Adafactor on CPUs is `host_adafactor`.
"""

from zeroshard.optim.adafactor import Adafactor
from zeroshard.optim.adam8bit import Adam8bit, AdamW8bit
from zeroshard.optim.between_steps import BetweenSteps
from zeroshard.optim.by_parameter import members_of
from zeroshard.optim.in_memory import fast_on_cpus
from zeroshard.optim.joined import Steps, spans_of
from zeroshard.optim.lamb import LAMB
from zeroshard.optim.muon import Muon, muon_groups
from zeroshard.optim.owners import Owners, deal_out
from zeroshard.optim.probe import StateLayout, check_elementwise, fresh_state, layout_of
from zeroshard.optim.shampoo import Shampoo
from zeroshard.optim.sm3 import SM3
from zeroshard.optim.soap import SOAP
from zeroshard.optim.spans import SliceSpan, SpanOptimizer

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
