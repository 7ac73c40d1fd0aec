"""Claims about techniques that are not built yet, each with the missing technique."""

from zeroshard.reproduce.claim import Waiting

_ZERO = "ZeRO, Rajbhandari et al., 1910.02054v3"
_TENSOR = "tensor parallelism, which cuts the layers themselves"
LATER = (
    Waiting(
        "zero-table-2-mp",
        "largest model by its states, with model parallelism",
        f"{_ZERO}, table 2, rows MP = 2 to 16",
        f"{_TENSOR}.",
    ),
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
        f"recomputation of activations without a pipeline, and {_TENSOR}.",
    ),
    Waiting(
        "recompute-sqrt",
        "activations grow with the root of the number of layers",
        "Chen et al., 1604.06174",
        "recomputation of activations in segments.",
    ),
    Waiting(
        "megatron-collectives",
        "all-reduces of a transformer block",
        "Megatron-LM, Shoeybi et al., 1909.08053, section 3",
        f"{_TENSOR}.",
    ),
    Waiting(
        "gist-footprint",
        "memory of activations, encoded",
        "Gist, Jain et al., ISCA 2018",
        "encodings of activations between forward and backward.",
    ),
)
