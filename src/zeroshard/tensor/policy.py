"""The settings of tensor parallelism."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.planning.foreign_names import explains_unknown
from zeroshard.planning.settings import check_flag, check_whole, shown


@explains_unknown
@dataclass(frozen=True, repr=False)
class TensorParallel:
    """Tensor parallelism: layers split among neighbouring ranks (Megatron-LM, 1909.08053; 2205.05198).

    Raises:
        PlanError: a value out of range.
    """

    ranks: int = 1
    """Ranks that split each layer among themselves and work on the same batch; neighbours by number."""
    sequence: bool = True
    """Sequence parallelism: norms and dropout between the split layers on 1/ranks of each sequence."""
    layers: tuple[str, ...] | None = None
    """How layers are split, as "path=style": a path with `*` for any part, and column, row, embedding, output, whole or
    the name of a style of torch.distributed.tensor.parallel; a table of paths and styles in Python. By default the
    model's own plan, or what its structure shows."""

    def __post_init__(self) -> None:
        check_whole("tensor_parallel", self.ranks)
        check_flag("tensor_parallel.sequence", self.sequence)
        if self.layers is not None:
            object.__setattr__(self, "layers", _pairs(self.layers))

    @property
    def splits(self) -> bool:
        """Whether layers are split."""
        return self.ranks > 1

    @property
    def styles(self) -> list[tuple[str, str]] | None:
        """The paths of `layers` with their styles, in order; None if `layers` is None."""
        return None if self.layers is None else [_pair(each) for each in self.layers]

    def __repr__(self) -> str:
        return shown(self)


def _pairs(layers: Any) -> tuple[str, ...]:
    """Paths and styles as "path=style"; styles may be objects of torch.distributed.tensor.parallel."""
    if isinstance(layers, Mapping):
        layers = [f"{path}={style if isinstance(style, str) else _name(style)}" for path, style in layers.items()]
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        layers = [layers]
    pairs = tuple(layers)
    for each in pairs:
        if not isinstance(each, str) or not all(_pair(each)):
            raise PlanError(
                f"tensor_parallel.layers has {each!r}; it must be a table of paths and styles, such as "
                f"{{'blocks.*.mlp.up': 'column', 'blocks.*.mlp.down': 'row'}}, or a list such as "
                f"['blocks.*.mlp.up=column']."
            )
    return pairs


def _name(style: Any) -> str:
    """The name of a style of torch.distributed.tensor.parallel; another if its layouts gather the features."""
    name = type(style).__name__
    side, gathered = {
        "ColwiseParallel": ("output_layouts", "colwise_gather_output"),
        "RowwiseParallel": ("input_layouts", "rowwise_split_input"),
    }.get(name, ("", name))
    layouts = [type(layout).__name__ for layout in getattr(style, side, None) or ()]
    return gathered if layouts == ["Replicate"] else name


def _pair(text: str) -> tuple[str, str]:
    path, _, style = text.rpartition("=")
    return path.strip(), style.strip()
