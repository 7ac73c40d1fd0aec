"""Claims about techniques that are not built yet, each with the missing technique."""

from zeroshard.reproduce.claim import Waiting

_ZERO = "ZeRO, Rajbhandari et al., 1910.02054v3"
LATER = (
    Waiting(
        "zero-table-2-measured",
        "largest model measured",
        f"{_ZERO}, table 2, right half",
        "recomputation of activations without a pipeline, which those runs used, and GPUs to run on.",
    ),
    Waiting(
        "zero-without-mp",
        "largest model of data parallelism alone, against plain data parallelism",
        f"{_ZERO}, figure 4",
        "recomputation of activations without a pipeline, which those runs used.",
    ),
    Waiting(
        "zero-activations",
        "activation checkpoints divided among the ranks of one model",
        f"{_ZERO}, section 6.1",
        "checkpoints of activations that are divided among the ranks of a layer.",
    ),
    Waiting(
        "recompute-sqrt",
        "activations grow with the root of the number of layers",
        "Chen et al., 1604.06174",
        "recomputation of activations in segments.",
    ),
    Waiting(
        "gist-footprint",
        "memory of activations, encoded",
        "Gist, Jain et al., ISCA 2018",
        "encodings of activations between forward and backward.",
    ),
)
