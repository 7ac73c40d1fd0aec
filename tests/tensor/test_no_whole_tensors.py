"""Tensors of whole split matrices: none while an engine loads and steps, one module's at a time while it is made."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zeroshard as zs
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

VOCABULARY, WIDTH, LAYERS = 211, 32, 3
CONFIG = GPTConfig(VOCABULARY, 64, WIDTH, 4, LAYERS)
WHOLE = {  # shapes of the matrices that are split
    *((VOCABULARY, WIDTH), (3 * WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)),
    *((WIDTH, VOCABULARY), (WIDTH, 3 * WIDTH)),
}


class Whole(TorchDispatchMode):
    """Notes real tensors that have the shape of a whole split matrix, or the width of the vocabulary.

    Attributes:
        seen: their shapes.
        most: bytes of them that were there at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()
        self.most = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.layout is torch.strided:
                self._note(leaf)
        return result

    def _note(self, tensor: Tensor) -> None:
        shape = tuple(tensor.shape)
        whole = shape in WHOLE or VOCABULARY in shape
        if not whole or not tensor.is_floating_point() or 0 in tensor.stride():
            return
        self.seen.add(shape)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, key, None)
        self.most = max(self.most, sum(self._alive.values()))


def run(mesh: zs.Mesh, folder: str, zero: int, sequence: bool) -> list[tuple[list[tuple[int, ...]], int]]:
    """What is whole while an engine is made, steps, loads, and is taken out."""
    plan = zs.Plan(zero=zero, tensor_parallel=zs.TensorParallel(mesh.ranks, sequence=sequence))
    found = []
    with torch.device("meta"):
        model = GPT(CONFIG)
    with Whole() as making:
        engine = zs.Engine(model, lambda p: torch.optim.AdamW(p, lr=1e-3), plan, mesh=mesh)
    found.append(making)
    tokens = torch.randint(VOCABULARY, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    with Whole() as stepping:
        for _ in range(2):
            engine.train_step((tokens[0], tokens[1]))
    found.append(stepping)
    with torch.no_grad(), Whole() as evaluating:
        engine(tokens[0], tokens[1])
    found.append(evaluating)
    engine.save(f"{folder}/{zero}{sequence}", wait=True)
    with Whole() as loading:
        engine.load(f"{folder}/{zero}{sequence}")
    found.append(loading)
    return [(sorted(each.seen), each.most) for each in found]


@pytest.mark.parametrize("zero, sequence", [(0, True), (2, False), (3, True)])
def test_whole_matrices_are_on_no_rank(pool: Pool, tmp_path: Path, zero: int, sequence: bool) -> None:
    largest = 4 * WIDTH * VOCABULARY
    for making, *others in pool.run(run, 2, str(tmp_path), zero, sequence):
        assert (VOCABULARY, WIDTH) in making[0] and making[1] <= 2 * largest  # of one module, and a copy
        for shapes, _ in others:
            assert shapes == []
