"""The random numbers of a model, as a plan says and as a technique divides its activations."""

from torch import nn

from zeroshard.parts.part import RandomNumbers, TorchStreams
from zeroshard.parts.zones import ActivationZones
from zeroshard.rng.exact import ExactNumbers
from zeroshard.rng.rows import Rows
from zeroshard.rng.streams import RankStreams, equalise


def random_numbers_of(
    model: nn.Module, exact: bool, seed: int, rows: Rows, zones: ActivationZones | None = None
) -> RandomNumbers:
    """Numbers keyed by what they are of if `exact`, else those of torch's streams.

    A collective call where activations are divided: ranks that work on the same data get the same generators.

    Args:
        rows: numbers the rows of the batches.
        zones: where activations are divided; None if nowhere.

    Raises:
        ModelError: the model has modules whose draws cannot be replaced, and they have to be.
    """
    if zones is None or zones.axis is None:
        return ExactNumbers(model, seed, rows) if exact else TorchStreams()
    equalise(zones.axis.comm)
    if exact:
        return ExactNumbers(model, seed, rows, zones)
    return RankStreams(model, zones, zones.axis.comm)
