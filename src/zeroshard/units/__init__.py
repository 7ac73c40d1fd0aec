"""Units: a model cut into pieces whose parameters live in flat buffers (the first backbone)."""

from zeroshard.units.find import Unit, find_units
from zeroshard.units.flat import Flat, is_small
from zeroshard.units.index import Entry, Index
from zeroshard.units.norm import norm_of

__all__ = ["Entry", "Flat", "Index", "Unit", "find_units", "is_small", "norm_of"]
