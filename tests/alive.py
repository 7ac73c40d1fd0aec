"""Counts of memory and of the wire that no part of zeroshard makes: by torch's storages, and by the kernel.

[Note: what is counted] `Alive` sees the result of every operation of its thread, keeps weak references to the storages
and adds up the bytes of those that are left, after each operation with a new storage or a resized one. On CPUs what
zeroshard keeps "on the device" comes from torch's allocator, and host memory does not, so that its storages cannot be
resized: they are left out. `Units` looks at the storages that the parameters of a block have viewed. `sent` is what the
kernel wrote for this process.
"""

import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage with a tensor's values; None for tensors without."""
    with torch._C.DisableTorchFunctionSubclass():  # parameters of an engine would ask about it
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        return None if local.is_meta or local.layout is not torch.strided else local.untyped_storage()


class Alive(TorchDispatchMode):
    """The storages made inside, at every operation ([Note: what is counted]).

    Attributes:
        most: the largest number of bytes alive at once, since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # with the bytes that it had

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._note([result] if isinstance(result, Tensor) else tree_leaves(result)):
            self.most = max(self.most, self.now())
        return result

    def _note(self, results: Iterable[Any]) -> bool:
        """Note the storages of results; whether one of them is new or was resized."""
        more = False
        for leaf in results:
            storage = storage_of(leaf) if isinstance(leaf, Tensor) else None
            if storage is None or not storage.resizable():
                continue
            key, nbytes = storage._cdata, storage.nbytes()
            ref, before = self._seen.get(key, (None, -1))
            if ref is None or ref() is None:
                ref, before = weakref.ref(storage), -1
            if before != nbytes:
                self._seen[key], more = (ref, nbytes), True
        return more

    def now(self) -> int:
        """Bytes that are alive."""
        alive = [storage for ref, _ in self._seen.values() if (storage := ref()) is not None]
        if len(self._seen) > 2 * len(alive):
            self._seen = {key: seen for key, seen in self._seen.items() if seen[0]() is not None}
        return sum(map(torch.UntypedStorage.nbytes, alive))

    def restart(self) -> int:
        """Let the peak start again from what is alive; returns that."""
        self.most = self.now()
        return self.most


class Units(TorchDispatchMode):
    """How many groups of parameters have their values in memory, at every operation that makes more than a view.

    Counted as [Note: what is counted] says.

    Attributes:
        forward: the largest number at once in forwards.
        backward: the same in backwards.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        super().__init__()
        self.forward = self.backward = 0
        self._groups = groups
        self._viewed: list[dict[int, weakref.ref[torch.UntypedStorage]]] = [{} for _ in groups]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        inside = torch._C._current_graph_task_id() != -1
        gathered = sum(map(self._has_values, self._groups, self._viewed))
        self.forward = max(self.forward, 0 if inside else gathered)
        self.backward = max(self.backward, gathered if inside else 0)
        return func(*args, **(kwargs or {}))

    def _has_values(
        self, parameters: Sequence[nn.Parameter], viewed: dict[int, weakref.ref[torch.UntypedStorage]]
    ) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # parameters of an engine would ask about it
            for parameter in parameters:
                storage = parameter.untyped_storage()
                if storage._cdata not in viewed or viewed[storage._cdata]() is None:
                    viewed[storage._cdata] = weakref.ref(storage)
        alive = (ref() for ref in viewed.values())
        return any(storage is not None and storage.nbytes() > 8 for storage in alive)  # more than one number


def blocks_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each block in the outermost lists of blocks, and of all other modules together."""
    lists = (nn.ModuleList, nn.Sequential)
    outer: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, lists) and len(module) > 2 and not any(name.startswith(f"{other}.") for other in outer):
            outer.append(name)
    blocks = [list(block.parameters()) for name in outer for block in model.get_submodule(name).children()]
    inside = {id(parameter) for block in blocks for parameter in block}
    return [*blocks, [parameter for parameter in model.parameters() if id(parameter) not in inside]]


def sent() -> int:
    """Bytes that this process has written so far, sockets included."""
    return int(Path("/proc/self/io").read_text().partition("wchar: ")[2].split()[0])
