"""The layers of a chain, and the modules of a model that they are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from zeroshard.errors import ModelError
from zeroshard.units import find_units
from zeroshard.units.watched_parameters import Absent

ALL_RUN = (
    "all blocks of a chain must run for every microbatch, in one order; with blocks that are skipped at random set the "
    "rate of that (layerdrop) to 0, or use pipeline_parallel=1"
)


@dataclass(slots=True, eq=False)
class Layer:
    """One layer of a chain.

    Attributes:
        modules: modules that run in it (a block includes its submodules).
        parameters: its parameters by name; a tied parameter appears in several layers.
    """

    number: int
    name: str
    modules: list[nn.Module] = field(default_factory=list)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


class BufferLayers(NamedTuple):
    """The layers that write a buffer; outside of the blocks also the layers whose surrounding code reads it."""

    layers: set[int]
    read: set[int]


def not_run(path: str) -> ModelError:
    """The error of a block that the example does not run."""
    return ModelError(
        f"The block {path!r} did not run in a forward of the example; name the blocks of the chain with units=(...). "
        f"{ALL_RUN[0].upper()}{ALL_RUN[1:]}."
    )


def refuse_mixture(model: nn.Module) -> None:
    """Refuse a model that is partly on the meta device.

    Raises:
        ModelError: with a parameter of each kind.
    """
    kinds = {parameter.is_meta: name for name, parameter in model.named_parameters()}
    if len(kinds) > 1:
        raise ModelError(
            f"The parameter {kinds[True]!r} is on the meta device and {kinds[False]!r} is real; to be cut into layers, "
            f"a model must be wholly on meta, or wholly real."
        )


def blocks_of(model: nn.Module, wanted: Sequence[str] | None) -> list[nn.Module]:
    """The blocks of a model: those named, the children of a `Sequential`, or the repeated ones without embeddings.

    Raises:
        ModelError: there are none.
    """
    if wanted is None and isinstance(model, nn.Sequential):
        return list(dict.fromkeys(model.children()))
    found = [unit.module for unit in find_units(model, wanted) if unit.name]
    if wanted is None:  # an embedding takes no activation; nanoGPT has both of its own beside the list of blocks
        found = [block for block in found if not isinstance(block, (nn.Embedding, nn.EmbeddingBag))] or found
    while any(isinstance(block, nn.ModuleList) for block in found):  # lists are not called
        found = [each for block in found for each in (block if isinstance(block, nn.ModuleList) else [block])]
    if not found and wanted is None:  # one block that runs several times stands in a list of its own
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        nested = {inner for each in lists for inner in each.modules() if inner is not each}
        found = list(dict.fromkeys(block for each in lists if each not in nested for block in each))
    if not found:
        raise ModelError(
            "The model has no repeated blocks to cut between; name its blocks with units=(...), or use "
            "pipeline_parallel=1."
        )
    return found


def runs_in(module: nn.Module, layer: Layer) -> bool:
    """Whether a module runs in a layer."""
    return any(module in top.modules() for top in layer.modules)


def is_gated(module: nn.Module) -> bool:
    """Whether a module outside of the blocks has a gate: it has parameters of its own, or no modules inside."""
    return bool(module._parameters) or not module._modules


def is_absent(parameter: nn.Parameter) -> bool:
    """Whether a parameter is of another chunk, whose values are not gathered."""
    return isinstance(parameter, Absent)
