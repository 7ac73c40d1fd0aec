"""Claims that are not computed yet, each with what is missing."""

from zeroshard.reproduce.claim import Waiting

_ZERO = "ZeRO, Rajbhandari et al., 1910.02054v3"
LATER = (
    Waiting(
        "zero-table-2-measured",
        "largest model measured",
        f"{_ZERO}, table 2, right half",
        "GPUs to run on; its techniques are built.",
    ),
    Waiting(
        "zero-without-mp",
        "largest model of data parallelism alone, against plain data parallelism",
        f"{_ZERO}, figure 4",
        "a claim that rehearses it; its techniques are built.",
    ),
    Waiting(
        "recompute-sqrt",
        "activations grow with the root of the number of layers",
        "Chen et al., 1604.06174",
        "recomputation in segments, rehearsed at several depths; recompute='sqrt' is built, and its growth tested.",
    ),
    Waiting(
        "gist-footprint",
        "memory of activations, encoded",
        "Gist, Jain et al., ISCA 2018",
        "a claim: its networks are trained for their zeros first, as benchmarks/gist.py does.",
    ),
)
