"""Slabs lie outside of torch's allocator, page-aligned, on the ledger; the pool lends each only once."""

import ctypes
import gc
import mmap
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from zeroshard.errors import BudgetExceeded, OffloadError
from zeroshard.memory import HostMemory
from zeroshard.memory import host as memory_of_the_host
from zeroshard.memory.ledger import Category, Ledger

PAGE = mmap.PAGESIZE
CPU = torch.device("cpu")
STATES = Category.OPTIMIZER_STATES
ODD = (0, 1, 511, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 17)


def host(ledger: Ledger | None = None, root: Path = Path("/")) -> HostMemory:
    return HostMemory(ledger or Ledger(), CPU, root)


class TestSlabs:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64])
    def test_they_are_page_aligned_zeroed_and_of_their_own_size(self, dtype: torch.dtype) -> None:
        for numel in ODD:
            slab = host().slab(numel, dtype, STATES, "m")
            assert slab.shape == (numel,) and slab.dtype == dtype and not slab.any()
            assert slab.data_ptr() % PAGE == 0 and slab.untyped_storage().nbytes() == numel * dtype.itemsize
            slab.fill_(1)
            assert slab.all()

    def test_torchs_allocator_does_not_see_them(self) -> None:
        memory = host()
        with torch.profiler.profile(profile_memory=True) as profile:
            memory.slab(2**20, torch.float32, STATES, "m")
            memory.borrow(2**20)
            kept = torch.zeros(2**10)
        assert sum(event.self_cpu_memory_usage for event in profile.events()) == kept.nbytes

    def test_the_ledger_holds_whole_pages_on_the_host(self) -> None:
        ledger = Ledger()
        memory = host(ledger)
        slab = memory.slab(PAGE + 10, torch.float32, STATES, "m", padding=10)
        account = ledger.account(STATES, "host")
        assert (account.current, account.padding) == (5 * PAGE, 40 + PAGE - 40)
        assert account.current - account.padding == 4 * PAGE  # what holds something
        assert ledger.total("device") == 0
        memory.free(slab.view(torch.uint8))
        assert (account.current, account.padding, account.peak) == (0, 0, 5 * PAGE)
        with pytest.raises(KeyError):
            memory.free(slab)

    def test_memory_goes_with_the_last_view(self) -> None:
        memory = host()
        slab = memory.slab(2**24, torch.uint8, STATES, "m")
        address, part = slab.data_ptr(), slab[5:]
        memory.free(slab)
        del slab
        assert mapped(address) and not part.any()
        del part
        gc.collect()
        assert not mapped(address)

    def test_what_nobody_holds_stays_until_it_is_freed(self) -> None:
        ledger = Ledger()
        memory = host(ledger)
        addresses = {memory.slab(PAGE, torch.uint8, STATES, "m").data_ptr() for _ in range(9)}
        assert len(addresses) == 9 and ledger.total("host") == 9 * PAGE

    @pytest.mark.skipif(
        tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="the kernel has no MADV_POPULATE_WRITE"
    )
    @pytest.mark.parametrize("threads", [1, 3])
    def test_pages_are_taken_at_once(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(memory_of_the_host, "TOUCH", 2**24)
        memory = host()
        before = resident()
        slab = memory.slab(2**26 + 1, torch.uint8, STATES, "m")
        assert resident() - before > 0.99 * slab.nbytes

    def test_the_budget_of_the_host(self) -> None:
        ledger = Ledger({"host": 4 * PAGE})
        memory = host(ledger)
        memory.slab(3 * PAGE + 1, torch.uint8, STATES, "m")
        with pytest.raises(BudgetExceeded, match=r"v needs 4,096 bytes of optimizer states on the host.*offload\.disk"):
            memory.slab(1, torch.uint8, STATES, "v")
        assert ledger.total("host") == 4 * PAGE

    def test_what_the_system_refuses(self, tmp_path: Path) -> None:
        ledger = Ledger()
        with pytest.raises(BudgetExceeded, match=f"m: needs {2**60:,} bytes of host memory; the system has not"):
            host(ledger, tmp_path).slab(2**60, torch.uint8, STATES, "m")
        assert ledger.total("host") == 0


def mapped(address: int) -> bool:
    """Whether there is memory at a page's address."""
    seen = (ctypes.c_ubyte * 1)()
    return ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), seen) == 0


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class FakeRuntime:
    """Stands for CUDA's: which addresses are registered; unregistering needs memory that is still there."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered, self.sizes = code, set[int](), list[int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert mapped(address)
        self.registered.add(address)
        self.sizes.append(nbytes)
        return self.code

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        assert mapped(address)
        self.registered.remove(address)


class TestRegistered:
    def test_registered_in_its_size_while_it_lives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = FakeRuntime()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        memory = HostMemory(Ledger(), torch.device("cuda"))
        slab = memory.slab(3 * PAGE + 1, torch.uint8, STATES, "m")
        part = slab[1:]
        assert runtime.registered == {slab.data_ptr()} and runtime.sizes == [4 * PAGE]
        memory.free(slab)
        del slab
        assert len(runtime.registered) == 1  # a copy may still be on its way
        del part
        assert not runtime.registered

    def test_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(code=2))
        ledger = Ledger()
        with pytest.raises(OffloadError, match=r"does not register 4,096 bytes of host memory \(cudaError 2\)"):
            HostMemory(ledger, torch.device("cuda")).slab(1, torch.uint8, STATES, "m")
        assert ledger.total("host") == 0

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    def test_on_a_gpu(self) -> None:
        slab = HostMemory(Ledger(), torch.device("cuda")).slab(2**20, torch.float32, STATES, "m")
        assert slab.is_pinned()
        slab.fill_(3)
        assert (slab.to("cuda", non_blocking=True) == 3).all()


class TestPool:
    def test_what_was_given_back_is_used_again(self) -> None:
        ledger = Ledger()
        memory = host(ledger)
        first = memory.borrow(PAGE + 1)
        address = first.data_ptr()
        assert first.nbytes == PAGE + 1 and first.dtype == torch.uint8 and address % PAGE == 0
        memory.give_back(first[: PAGE // 2 * 2].view(torch.float32))
        assert memory.borrow(2 * PAGE).data_ptr() == address  # as many pages
        assert ledger.account(Category.BUFFERS, "host").current == 2 * PAGE
        assert memory.borrow(2 * PAGE).data_ptr() != address
        assert memory.borrow(PAGE).data_ptr() != address  # a size never gets another's memory
        assert ledger.account(Category.BUFFERS, "host").current == 5 * PAGE

    def test_what_is_borrowed_counts_as_what_it_is_for(self) -> None:
        ledger = Ledger({"host": 2 * PAGE})
        memory = host(ledger)
        for category in (Category.ACTIVATIONS, Category.BUFFERS, Category.ACTIVATIONS):
            lent = memory.borrow(2 * PAGE, category)
            assert {name: n for name, n in ledger.snapshot("host").items() if n} == {str(category): 2 * PAGE}
            memory.give_back(lent)
            assert {name: n for name, n in ledger.snapshot("host").items() if n} == {"buffers": 2 * PAGE}
        memory.borrow(2 * PAGE, Category.GRADIENTS)
        memory.close()
        assert ledger.total("host") == 0

    def test_nothing_is_lent_twice(self) -> None:
        memory = host()
        lent = memory.borrow(PAGE)
        memory.give_back(lent)
        with pytest.raises(KeyError):
            memory.give_back(lent)

    def test_nothing_needs_no_memory(self) -> None:
        memory = host(Ledger({"host": 0}))
        memory.give_back(memory.borrow(0))
        memory.free(memory.slab(0, torch.float32, STATES, "m"))

    def test_it_keeps_what_it_has_until_the_end(self) -> None:
        ledger = Ledger()
        memory = host(ledger)
        memory.slab(1, torch.float32, STATES, "m", padding=1)
        kept = memory.borrow(3 * PAGE)
        memory.give_back(memory.borrow(PAGE))
        assert ledger.total("host") == 5 * PAGE
        memory.close()
        assert ledger.total("host") == 0 and ledger.account(STATES, "host").padding == 0
        kept.fill_(1)  # the memory itself is there while it is held

    def test_several_threads(self) -> None:
        ledger, wrong = Ledger(), list[int]()
        memory = host(ledger)

        def work(number: int) -> None:
            for _ in range(100):
                block = memory.borrow(PAGE).fill_(number)
                time.sleep(0)
                wrong.append(int((block != number).sum()))
                memory.give_back(block)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wrong) == 400 and not any(wrong) and ledger.total("host") <= 4 * PAGE
