"""Saved tensors that stay on the device, in the ledger for as long as a graph holds them.

[Note: inputs of checkpoints] Autograd makes a new tensor from the result of a saved-tensor hook, so arguments of
`torch.utils.checkpoint` that were one tensor would be two when read again, and a module that tests `query is key` would
compute another result. So an input that stays on the device bypasses the hooks: its frame of `torch.utils.checkpoint`
holds the tensor itself, as without hooks, and its count. A moved one is read once for all its arguments.
"""

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.errors import OffloadError
from zeroshard.memory.ledger import SavedStorages
from zeroshard.units.hooks import tensors_in

checkpoints: Any = torch.utils.checkpoint
CHECKPOINTS: str = checkpoints.__file__


class Kept:
    """A saved tensor that stays on its device; detached, so that its graph does not hold itself.

    Attributes:
        counted: an object whose end removes it from a count, or None.
    """

    __slots__ = ("counted", "saved", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.saved, self.version = tensor.detach() if tensor.requires_grad else tensor, tensor._version
        self.counted: object = None

    def tensor(self) -> Tensor:
        """The tensor; raises `OffloadError` if it was changed in place."""
        if self.saved._version != self.version:
            raise changed_in_place(self.saved.shape, self.saved.dtype)
        return self.saved


class Stored:
    """A saved tensor packed by hooks: the tensor itself, or its saver's handle."""

    __slots__ = ("__weakref__", "saved")

    def __init__(self, saved: Any) -> None:
        self.saved = saved


class CountedTensor(Stored):
    """A saved tensor on the device, counted while the graph holds it."""

    __slots__ = ("counts", "storage")

    def __init__(self, tensor: Tensor, saved: Any, counts: SavedStorages) -> None:
        self.saved, self.storage = saved, tensor.untyped_storage()
        self.counts: SavedStorages | None = None
        counts.change(self.storage, 1)
        self.counts = counts  # unless the budget has refused it

    def __del__(self) -> None:
        if self.counts is not None:
            self.counts.change(self.storage, -1)


class HooksOfForward(saved_tensors_hooks):
    """Hooks of saved tensors around a model's forward ([Note: inputs of checkpoints])."""

    def __enter__(self) -> None:
        self._frames = checkpoints._CheckpointFrame
        checkpoints._CheckpointFrame = _Frame
        super().__enter__()

    def __exit__(self, *of_error: object) -> None:
        super().__exit__(*of_error)
        checkpoints._CheckpointFrame = self._frames


def recomputed_by_others(in_backward: bool = True) -> bool:
    """Whether the model's own checkpointing or compiled code runs now; or a backward, if `in_backward`."""
    if (in_backward and torch._C._current_graph_task_id() != -1) or torch.compiler.is_compiling():
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__code__", _NOT_TORCH).co_filename == CHECKPOINTS


_NOT_TORCH = recomputed_by_others.__code__


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is compiled or scripted."""
    graph = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    return graph or isinstance(module, torch.jit.ScriptModule)


def changed_in_place(shape: torch.Size, dtype: torch.dtype) -> OffloadError:
    """The error of a backward that would read changed values."""
    return OffloadError(
        f"A tensor of shape {tuple(shape)} and {dtype} that the backward needs was changed in place after the forward "
        f"saved it. Use the operation that is not in place there, or change a clone."
    )


class _Frame(checkpoints._CheckpointFrame):  # type: ignore[misc]
    """torch's frame of one checkpointed function."""

    def save_inputs(self, *args: Any) -> None:
        """Keep the arguments, each tensor once."""
        self.counts: list[Any] = []
        others = [arg for arg in args if not isinstance(arg, Tensor)]
        saved = {id(tensor): tensor for tensor in tensors_in((others, _keywords(self.recompute_fn)))}  # held anyway
        for arg in args:
            if isinstance(arg, Tensor) and id(arg) not in saved:
                saved[id(arg)] = self._save(arg)
        self.saved_args = [saved.get(id(arg), arg) for arg in args]

    def get_inputs(self) -> list[Any]:
        """The arguments; those that were one tensor are one again."""
        again = {id(arg): _read(arg) for arg in self.saved_args}
        return [again[id(arg)] for arg in self.saved_args]

    def _save(self, tensor: Tensor) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(True)  # leaves out the hooks
        try:
            saved: Any = torch._C._autograd._make_saved_tensor(tensor, is_output=False)
        finally:
            torch._C._autograd._saved_tensors_hooks_set_tracing(tracing)
        if hooks is None:
            return saved
        with torch.no_grad():
            packed = hooks[0](tensor)
        if isinstance(packed, Stored) and isinstance(packed.saved, Kept):
            self.counts.append(packed)
        else:
            saved.register_hooks(lambda _: packed, hooks[1])
        return saved


def _read(saved: Any) -> Any:
    return saved.unpack() if isinstance(saved, torch._C._autograd.SavedTensor) else saved


def _keywords(recompute: Any) -> Any:
    """The keywords of the checkpointed function."""
    cells = dict(zip(recompute.__code__.co_freevars, recompute.__closure__ or (), strict=True))
    return cells["kwargs"].cell_contents if "kwargs" in cells else None
