"""Units: a model cut into pieces whose parameters live in flat buffers (the first backbone).

Read `find` (the modules that are units), `flat` (one buffer, its index and its views), `materialise` (initial
weights), `watched_parameters` (parameters that report reads and writes), `hooks` (hooks of one engine).
"""

from zeroshard.units.find import Unit, find_units
from zeroshard.units.flat import Entry, Flat, Index, is_small, norm_of, wide_norm, written_while_absent
from zeroshard.units.watched_parameters import (
    ForwardAlias,
    HeldGradient,
    Unreadable,
    in_dispatch_handler,
    kinds_for,
    set_values,
    values_of,
)

__all__ = [
    "Entry",
    "Flat",
    "ForwardAlias",
    "HeldGradient",
    "Index",
    "Unit",
    "Unreadable",
    "find_units",
    "in_dispatch_handler",
    "is_small",
    "kinds_for",
    "norm_of",
    "set_values",
    "values_of",
    "wide_norm",
    "written_while_absent",
]
