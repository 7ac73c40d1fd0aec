"""What the tests of activations on the host stand on: a host and a link that punish mistakes, and a store on them."""

import mmap
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from task_runners import Latest
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from zeroshard.memory import HostMemory
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.memory.transfers import Task, TaskRunner, Transfers
from zeroshard.saved.offload import ActivationStore
from zeroshard.saved.savers import Savers
from zeroshard.traffic import Purpose


class Host(HostMemory):
    """Slabs outside of torch's allocator; one that is given back is spoilt, and the first to be lent again."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def borrow(self, nbytes: int, category: Category = Category.BUFFERS) -> torch.Tensor:
        assert category is Category.ACTIVATIONS
        self.ledger.take(category, nbytes, "borrow", tier="host")
        free = self.free[nbytes]
        return free.pop() if free else torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    def give_back(self, tensor: torch.Tensor) -> None:
        self.ledger.give(Category.ACTIVATIONS, tensor.nbytes, "borrow", tier="host")
        self.free[tensor.nbytes].append(tensor.fill_(255))  # in floating point: NaN


class Watched(Transfers):
    """A link on which a copy is under way until it is waited for, as on a GPU: until then both ends must live."""

    def __init__(self, executor: TaskRunner) -> None:
        super().__init__(executor)
        self.flying: dict[Task, tuple[StorageWeakRef, ...]] = {}

    def copy(self, source: torch.Tensor, into: torch.Tensor, *args: Any, **kwargs: Any) -> Task:
        task = super().copy(source, into, *args, **kwargs)
        self.flying[task] = (StorageWeakRef(source.untyped_storage()), StorageWeakRef(into.untyped_storage()))
        return task

    def wait(self, task: Task) -> None:
        assert not any(end.expired() for end in self.flying.pop(task)), "freed while its copy was under way"
        super().wait(task)

    def calls(self) -> tuple[int, int]:
        """Copies (down, up)."""
        found = [self.counts.get(purpose) for purpose in (Purpose.ACTIVATIONS_DOWN, Purpose.ACTIVATIONS_UP)]
        down, up = (count.calls if count else 0 for count in found)
        return down, up


class Bench:
    """A store and all that it stands on."""

    def __init__(
        self,
        executor: Callable[[], TaskRunner] = Latest,
        smallest: int = 256,
        window: int = 2,
        host: Callable[[Ledger], HostMemory] = Host,
    ) -> None:
        self.link, self.ledger = Watched(executor()), Ledger()
        store = ActivationStore(self.link, host(self.ledger), self.ledger, smallest, window)
        self.store = Savers([store])

    @contextmanager
    def saving(self, *modules: nn.Module) -> Iterator[None]:
        """Inside, what autograd saves goes to the store, but for the parameters of the modules."""
        own = {p.untyped_storage()._cdata for module in modules for p in module.parameters()}

        def pack(tensor: torch.Tensor) -> Any:
            return (tensor,) if tensor.untyped_storage()._cdata in own else self.store.pack(tensor)

        def unpack(saved: Any) -> torch.Tensor:
            return saved[0] if isinstance(saved, tuple) else self.store.unpack(saved)

        with saved_tensors_hooks(pack, unpack):
            yield

    def held(self) -> int:
        """Bytes on the host."""
        return self.ledger.account(Category.ACTIVATIONS, "host").current

    def nothing_is_left(self) -> bool:
        self.store.settle()
        return self.held() == 0 and not self.link.flying
