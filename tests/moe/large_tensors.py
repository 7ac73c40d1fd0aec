"""A count of large tensors whose memory is made."""

from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargeTensors(TorchDispatchMode):
    """Counts the tensors of at least `nbytes` that operations make; copies of what they were given are such too."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._made: dict[int, Tensor] = {}  # kept, so that no memory is used twice

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._made)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in (t for t in tree_leaves(result) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            if storage.nbytes() >= self._nbytes and storage.data_ptr() not in given:
                self._made.setdefault(storage.data_ptr(), tensor)
        return result


def made_by(function: Callable[[], object], nbytes: int) -> int:
    """How many tensors of at least `nbytes` a call makes."""
    with LargeTensors(nbytes) as large:
        function()
    return large.count
