"""The formulas of the papers for a GPT block whose layers are split, written from them and not from the engine.

Korthikanti et al., 2205.05198, section 4, for the activations; Narayanan et al., 2104.04473, sections 2.3 and 3.2, for
what is sent, and section 5.1 for parameters. Activations and gradients have 16 bits, dropout masks 8; t are the ranks.
"""

from dataclasses import dataclass
from fractions import Fraction

from zeroshard.reproduce.block_times import BlockShape


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a block saves for its backward.

    Attributes:
        width: bytes per element of b·s·h.
        score: bytes per attention score.
        split: whether each rank has a part of it because the layers are split; otherwise sequence parallelism alone
            leaves each rank with its positions.
    """

    name: str
    width: int = 0
    score: int = 0
    split: bool = False


SAVED = (  # section 4.1, in the order of the forward
    SavedTensor("input of the attention's norm", width=2),
    SavedTensor("input of query, key and value", width=2),
    SavedTensor("query and key", width=4, split=True),
    SavedTensor("softmax", score=2, split=True),
    SavedTensor("mask of the dropout of scores", score=1, split=True),
    SavedTensor("scores after dropout", score=2, split=True),
    SavedTensor("value", width=2, split=True),
    SavedTensor("input of the attention's output layer", width=2, split=True),
    SavedTensor("mask of the attention's dropout", width=1),
    SavedTensor("input of the MLP's norm", width=2),
    SavedTensor("input of the MLP's first layer", width=2),
    SavedTensor("input of the non-linearity", width=8, split=True),
    SavedTensor("input of the MLP's second layer", width=8, split=True),
    SavedTensor("mask of the MLP's dropout", width=1),
)


def saved_bytes(shape: BlockShape, ranks: int = 1, sequence: bool = False) -> dict[str, Fraction]:
    """Bytes that each rank saves of one block and microbatch, by tensor.

    In all s·b·h·(34 + 5·a·s/h) on one rank (equation 1), s·b·h·(10 + 24/t + 5·a·s/(h·t)) with split layers (equation
    2), and s·b·h/t·(34 + 5·a·s/h) with sequence parallelism (equation 4).
    """
    found = {}
    for each in SAVED:
        nbytes = each.width * shape.elements + each.score * shape.scores
        found[each.name] = Fraction(nbytes, ranks if each.split or sequence else 1)
    return found


@dataclass(frozen=True, slots=True)
class BlockMessages:
    """Collectives of one block for one microbatch, forward and backward, each over b·s·h elements.

    Attributes:
        sums: all-reduces.
        gathers: of positions, whose result is b·s·h.
        scatters: sums of which each rank keeps its positions.
    """

    sums: int = 0
    gathers: int = 0
    scatters: int = 0

    def wire_elements(self, shape: BlockShape) -> dict[str, int]:
        """Elements by purpose as comm counts them: 2Ψ for a sum of Ψ, Ψ for a gather or a sum that is scattered."""
        summed = (2 * self.sums + self.scatters) * shape.elements
        return {"sum activations": summed, "gather activations": self.gathers * shape.elements}


def block_messages(sequence: bool = False, recompute: bool = False) -> BlockMessages:
    """The collectives of a block: two sums forward and two backward (2104.04473, section 2.3).

    With sequence parallelism each sum becomes a gather and a scattered sum, and the backward gathers the inputs of both
    column-parallel layers again instead of keeping them (2205.05198, section 4.2.2).

    Args:
        recompute: whether the backward computes the forward once more, with its collectives.
    """
    forwards = 2 if recompute else 1
    if not sequence:
        return BlockMessages(sums=2 * forwards + 2)
    return BlockMessages(gathers=2 * forwards + 2 + 2, scatters=2 * forwards + 2)


def block_parameters(width: int, ranks: int = 1, biases: bool = True, scale_only: bool = False) -> Fraction:
    """Parameters of a GPT block on each rank: 12·h²/t, its norms, and its biases.

    Biases of column-parallel layers are split (3·h + 4·h), those of row-parallel ones are not (h + h).

    Args:
        scale_only: norms have no bias.
    """
    split = 12 * width**2 + (7 * width if biases else 0)
    norms = 2 * width if scale_only else 4 * width
    return Fraction(split, ranks) + norms + (2 * width if biases else 0)
