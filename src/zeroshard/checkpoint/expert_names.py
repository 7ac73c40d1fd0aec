"""Names of experts' weights: one tensor for each expert in files of transformers, one for all in its models.

    files of Mixtral     ...block_sparse_moe.experts.3.w1.weight [F, D] (gate), .w3.weight [F, D], .w2.weight [D, F]
    files of most others ...mlp.experts.3.gate_proj.weight [F, D], .up_proj.weight [F, D], .down_proj.weight [D, F]
    models               ...mlp.experts.gate_up_proj [E, 2F, D], ...mlp.experts.down_proj [E, D, F]

Other families (GPT-OSS, Switch Transformers) have the same names in files and models. Shapes: E experts, D width,
F hidden features.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zeroshard.checkpoint.boxes import Box, BoxValues
from zeroshard.errors import CheckpointError

Shape = tuple[int, ...]
STACKED = re.compile(r"(?P<mixture>.*\.experts)\.(?P<part>gate_up_proj|down_proj)")
SINGLE = re.compile(r"(?P<mixture>.*\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a family in files.

    Attributes:
        block: the module around router and experts, which is `mlp` in models.
        parts: names of an expert's weights, by the stacked name; first the gate, then the gated weight.
    """

    block: str
    parts: Mapping[str, tuple[str, ...]]

    @property
    def singles(self) -> frozenset[str]:
        """The names of all weights of an expert."""
        return frozenset(part for parts in self.parts.values() for part in parts)


MIXTRAL = ExpertNames("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)})
USUAL = ExpertNames("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)})
FAMILIES = {  # by the model_type of configurations, as transformers 5.23 writes them
    **dict.fromkeys(("mixtral", "minimax"), MIXTRAL),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "flex_olmo", "dots1"), USUAL),
}


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A tensor of a file, as part of a tensor of a checkpoint.

    Attributes:
        name: in the file.
        shape: in the file.
        start: its first element in the other tensor, in row-major order; all of its elements follow.
    """

    name: str
    shape: Shape
    start: int = 0


def in_files(name: str, shape: Shape, family: ExpertNames | None) -> Iterator[Excerpt]:
    """The tensors in the files of a family that make up a tensor of a model.

    Args:
        family: None for one with the same names in its files.
    """
    found = STACKED.fullmatch(name) if family is not None and len(shape) == 3 else None
    if family is None:
        yield Excerpt(name, shape)
    elif found is None:
        yield Excerpt(name.replace(".mlp.", f".{family.block}."), shape)
    else:
        mixture, parts = found["mixture"].replace(".mlp.", f".{family.block}."), family.parts[found["part"]]
        part_shape = (shape[1] // len(parts), shape[2])
        for number in range(shape[0] * len(parts)):
            expert, part = divmod(number, len(parts))
            start = number * math.prod(part_shape)
            yield Excerpt(f"{mixture}.{expert}.{parts[part]}.weight", part_shape, start)


class Tensors(Protocol):
    """Tensors by their names in files."""

    shapes: dict[str, Shape]

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor."""

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, flat and in its own dtype."""


class StackedTensors:
    """Tensors of files under a model's names: single experts as stacks, all others unchanged.

    Args:
        path: of the files, for messages.

    Raises:
        CheckpointError: an expert or a part of one is missing, or has another shape than the others.
    """

    def __init__(self, tensors: Tensors, path: object) -> None:
        self._tensors, self._path = tensors, path
        self._stacks: dict[str, list[list[str]]] = {}  # by expert, its parts
        self._renamed: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        mixtures, others = _mixtures(tensors.shapes)
        blocks = set()
        for mixture, experts in mixtures.items():
            held = {part for parts in experts.values() for part in parts}
            family = next((each for each in (MIXTRAL, USUAL) if each.singles & held), None)
            known = family.singles if family is not None else frozenset()
            others += [name for parts in experts.values() for part, name in parts.items() if part not in known]
            if family is not None:
                blocks.add(family.block)
                self._stack(mixture, experts, family)
        for name in others:
            renamed = name
            for block in blocks:
                renamed = renamed.replace(f".{block}.", ".mlp.")
            self._renamed[renamed] = name
            self.shapes[renamed] = tensors.shapes[name]

    def _stack(self, mixture: str, experts: Mapping[int, Mapping[str, str]], family: ExpertNames) -> None:
        count = max(experts) + 1
        for stacked, parts in family.parts.items():
            names = [[f"{mixture}.{expert}.{part}.weight" for part in parts] for expert in range(count)]
            flat = [name for held in names for name in held]
            missing = [name for name in flat if name not in self._tensors.shapes]
            if missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise CheckpointError(
                    f"{self._path} lacks '{missing[0]}'{more}, and holds other weights of these {count} experts. Copy "
                    f"it again."
                )
            first = self._tensors.shapes[flat[0]]
            unlike = next((name for name in flat if self._tensors.shapes[name] != first), None)
            if unlike is not None or len(first) != 2:
                raise CheckpointError(
                    f"{self._path} holds '{flat[0]}' as {first} and '{unlike or flat[-1]}' as "
                    f"{self._tensors.shapes[unlike or flat[-1]]}; experts need two dimensions and one shape."
                )
            name = f"{mixture.replace(f'.{family.block}.', '.mlp.')}.{stacked}"
            self._stacks[name] = names
            self.shapes[name] = (count, len(parts) * first[0], first[1])

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor."""
        if name not in self._stacks:
            self._tensors.fill(self._renamed[name], targets)
            return
        for target in targets:
            if not target.box.inside(Box.whole(self.shapes[name])):
                raise CheckpointError(
                    f"{self._path} holds '{name}' of {self.shapes[name]}, and [{target.box}] was asked for."
                )
            for source, part in self._parts(name, target):
                self._tensors.fill(source, [part])

    def _parts(self, name: str, target: BoxValues) -> Iterator[tuple[str, BoxValues]]:
        """The tensors of single experts that a box contains, each with its box there and the view for its values."""
        (first, row, column), (count, rows, columns) = target.box.start, target.box.shape
        height = self.shapes[name][1] // len(self._stacks[name][0])
        for expert in range(first, first + count):
            for part, source in enumerate(self._stacks[name][expert]):
                low, high = max(row, part * height), min(row + rows, (part + 1) * height)
                if low < high:
                    box = Box((low - part * height, column), (high - low, columns))
                    yield source, BoxValues(box, target.values[expert - first, low - row : high - row])

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, flat."""
        if name not in self._stacks:
            return self._tensors.whole(self._renamed[name])
        return torch.cat([self._tensors.whole(part) for held in self._stacks[name] for part in held])


def are_stacked(names: Iterable[str]) -> bool:
    """Whether a model has stacked experts, by the names of its parameters."""
    return any(STACKED.fullmatch(name) for name in names)


def _mixtures(names: Iterable[str]) -> tuple[dict[str, dict[int, dict[str, str]]], list[str]]:
    """The names of single experts' weights by mixture, expert and part; and all other names."""
    mixtures: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    others = []
    for name in names:
        found = SINGLE.fullmatch(name)
        if found is None:
            others.append(name)
        else:
            mixtures[found["mixture"]][int(found["expert"])][found["part"]] = name
    return mixtures, others
