"""What is written to a disk comes back bit for bit; disks that are full, broken or slow say so and lose nothing."""

import errno
import itertools
import mmap
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zeroshard.errors import BudgetExceeded, OffloadError
from zeroshard.memory import Disk, Extent, HostMemory, in_pages
from zeroshard.memory.ledger import Category, Ledger

PAGE = mmap.PAGESIZE
CPU = torch.device("cpu")
STATES = Category.OPTIMIZER_STATES
ODD = (0, 1, 511, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 17)


def host(ledger: Ledger | None = None, root: Path = Path("/")) -> HostMemory:
    return HostMemory(ledger or Ledger(), CPU, root)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def disk(tmp_path: Path, ledger: Ledger) -> Disk:
    return Disk(tmp_path / "folder", ledger, timeout=60.0)


class Flaky:
    """A system call that works but for its `number`-th use, which fails with `code` or moves only `part` bytes."""

    def __init__(self, call: Callable[..., int], number: int, code: int = 0, part: int = 0) -> None:
        self._call, self._left, self._code, self._part = call, number, code, part

    def __call__(self, file: int, buffers: list[memoryview], offset: int) -> int:
        self._left -= 1
        if self._left == 0 and self._code:
            raise OSError(self._code, os.strerror(self._code))
        if self._left == 0:
            buffers = [buffers[0][: self._part]]
        return self._call(file, buffers, offset) if buffers[0].nbytes else 0


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.memory.disk.PIECE", 4 * PAGE)


class TestDisk:
    def test_odd_sizes_come_back_bit_for_bit(self, disk: Disk, small_pieces: None) -> None:
        memory = host()
        sizes = (*ODD, 9 * PAGE + 3)
        held = [(disk.reserve(size, STATES, f"{size}"), noise(size, size)) for size in sizes]
        for extent, value in held:
            slab = memory.borrow(extent.nbytes)
            disk.write(extent, slab.copy_(value))
        for extent, value in reversed(held):
            slab = memory.borrow(extent.nbytes).fill_(7)
            disk.read(extent, slab)
            assert torch.equal(slab, value)

    def test_tensors_of_any_kind_and_place(self, disk: Disk, small_pieces: None) -> None:
        slab = host().slab(20 * PAGE, torch.float32, STATES, "m")
        parts = [
            slab[3 : 3 + 7 * PAGE],
            slab[PAGE : 2 * PAGE].view(16, -1),
            torch.randn(5000).bfloat16(),
            torch.randn(10, requires_grad=True),
        ]
        slab.copy_(torch.randn(slab.numel()))
        for number, part in enumerate(parts):
            extent = disk.reserve(part.nbytes, STATES, f"{number}")
            disk.write(extent, part)
            for into in (torch.zeros_like(part), host().borrow(part.nbytes).view(part.dtype)):
                disk.read(extent, into)
                assert torch.equal(into.view(-1), part.detach().view(-1))

    def test_extents_do_not_touch_each_other(self, disk: Disk) -> None:
        extents = [disk.reserve(size, STATES, "x") for size in ODD]
        assert all(extent.offset % PAGE == 0 for extent in extents)
        assert all(a.offset + in_pages(a.nbytes) == b.offset for a, b in itertools.pairwise(extents))

    def test_the_ledger_holds_whole_pages_on_the_disk(self, disk: Disk, ledger: Ledger) -> None:
        disk.reserve(PAGE + 1, STATES, "m")
        account = ledger.account(STATES, "disk")
        assert (account.current, account.padding) == (2 * PAGE, PAGE - 1)
        assert ledger.total("host") == ledger.total("device") == 0
        disk.close()
        assert (account.current, account.padding) == (0, 0)

    def test_blocks_are_taken_when_they_are_reserved(self, disk: Disk) -> None:
        disk.reserve(2**20, STATES, "m")
        assert os.fstat(disk._file).st_blocks * 512 >= 2**20

    @pytest.mark.parametrize("named_first", [False, True])
    def test_the_file_has_no_name(
        self, named_first: bool, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.open

        def without(path: object, flags: int, *arguments: int, **keywords: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no")
            return real(path, flags, *arguments, **keywords)  # type: ignore[arg-type]

        if named_first:
            monkeypatch.setattr(os, "open", without)
        disk = Disk(tmp_path, ledger, 60.0)
        extent, value, into = disk.reserve(9999, STATES, "m"), noise(9999), torch.zeros(9999, dtype=torch.uint8)
        disk.write(extent, value)
        assert list(tmp_path.iterdir()) == []
        disk.read(extent, into)
        assert torch.equal(value, into)

    def test_a_folder_that_cannot_be(self, tmp_path: Path, ledger: Ledger) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(OffloadError, match=r"No file can be made in .*file/folder \(Not a directory\)"):
            Disk(tmp_path / "file" / "folder", ledger, 60.0)

    def test_only_the_last_part_of_a_path_is_made(self, tmp_path: Path, ledger: Ledger) -> None:
        Disk(tmp_path / "new", ledger, timeout=10.0).close()
        assert (tmp_path / "new").is_dir()
        with pytest.raises(OffloadError, match=r"nope/x cannot be made, because .*nope does not exist; correct"):
            Disk(tmp_path / "nope" / "x", ledger, timeout=10.0)
        assert not (tmp_path / "nope").exists()

    def test_files_are_closed_with_the_disk(self, tmp_path: Path, ledger: Ledger) -> None:
        open_files = len(os.listdir("/proc/self/fd"))
        disk = Disk(tmp_path, ledger, 60.0)
        assert len(os.listdir("/proc/self/fd")) > open_files
        del disk
        assert len(os.listdir("/proc/self/fd")) == open_files

    def test_without_direct_access(self, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file system that takes O_DIRECT when the file is opened and refuses it later, and one that never does."""
        disk = Disk(tmp_path, ledger, 60.0)
        if disk._direct == disk._file:
            pytest.skip("this file system never does")
        calls = list[int]()

        def refusing(file: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(file)
            if file != disk._file:
                raise OSError(errno.EINVAL, "no")
            return real(file, buffers, offset)

        real = os.pwritev
        monkeypatch.setattr(os, "pwritev", refusing)
        slab, into = host().borrow(3 * PAGE).copy_(noise(3 * PAGE)), torch.empty(3 * PAGE, dtype=torch.uint8)
        for _ in range(2):
            extent = disk.reserve(slab.nbytes, STATES, "m")
            disk.write(extent, slab)
            disk.read(extent, into)
            assert torch.equal(slab, into)
        assert calls.count(disk._file) == 2 and len(calls) == 3

    @pytest.mark.parametrize("part", [1, PAGE - 1, PAGE, 2 * PAGE + 5])
    @pytest.mark.parametrize("number", [1, 2])
    def test_calls_that_move_a_part(
        self, part: int, number: int, disk: Disk, small_pieces: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        value, into = host().borrow(11 * PAGE + 5), host().borrow(11 * PAGE + 5)
        value.copy_(noise(value.nbytes))
        extent = disk.reserve(value.nbytes, STATES, "m")
        monkeypatch.setattr(os, "pwritev", Flaky(os.pwritev, number, part=part))
        monkeypatch.setattr(os, "preadv", Flaky(os.preadv, number, part=part))
        if part % PAGE:  # then it went through the kernel's cache
            monkeypatch.setattr(disk, "_direct", disk._file)
        disk.write(extent, value)
        disk.read(extent, into)
        assert torch.equal(value, into)

    def test_a_signal_in_between(self, disk: Disk) -> None:
        value = host().borrow(2**24).copy_(noise(2**24))
        extent, into = disk.reserve(value.nbytes, STATES, "m"), host().borrow(2**24)
        seen = list[int]()
        before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            disk.write(extent, value)
            disk.read(extent, into)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert seen and torch.equal(value, into)

    def test_bandwidth_is_measured_once_and_leaves_nothing(
        self, disk: Disk, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("zeroshard.memory.disk.PROBE", 2**20)
        extent, value = disk.reserve(5000, STATES, "m"), noise(5000)
        disk.write(extent, value)
        read, write = disk.bandwidth()
        assert read > 0 and write > 0 and disk.bandwidth() == (read, write)
        assert ledger.total("disk") == os.fstat(disk._file).st_size == in_pages(5000)
        into = torch.zeros_like(value)
        disk.read(extent, into)
        assert torch.equal(value, into)


class TestDisksThatFail:
    def test_full(self, disk: Disk, ledger: Ledger) -> None:
        kept = disk.reserve(PAGE, STATES, "kept")
        facts = os.statvfs(disk.folder)
        asked = (facts.f_blocks + 1) * facts.f_frsize
        with pytest.raises(OffloadError) as error:
            disk.reserve(asked, STATES, "moments of block 3")
        for part in (
            "moments of block 3",
            f"{in_pages(asked):,}",
            str(disk.folder),
            "free",
            "No space left",
            "offload.",
        ):
            assert part in str(error.value)
        assert ledger.total("disk") == os.fstat(disk._file).st_size == PAGE
        assert disk.reserve(1, STATES, "next").offset == kept.offset + PAGE

    def test_full_for_this_process(self, disk: Disk, ledger: Ledger) -> None:
        disk.reserve(PAGE, STATES, "kept")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * PAGE, hard))
        try:
            with pytest.raises(OffloadError, match=r"m: needs 32,768 bytes of the disk .*\(File too large\)"):
                disk.reserve(8 * PAGE, STATES, "m")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert ledger.total("disk") == os.fstat(disk._file).st_size == PAGE

    def test_the_budget_of_the_disk(self, tmp_path: Path) -> None:
        disk = Disk(tmp_path, Ledger({"disk": 2 * PAGE}), 60.0)
        with pytest.raises(BudgetExceeded, match="on the disk"):
            disk.reserve(2 * PAGE + 1, STATES, "m")
        disk.reserve(2 * PAGE, STATES, "m")

    @pytest.mark.parametrize("number", [1, 2, 3, 4])
    def test_a_write_that_fails_can_be_tried_again(
        self, number: int, disk: Disk, small_pieces: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        value, before = host().borrow(13 * PAGE + 1), noise(13 * PAGE + 1)
        value.copy_(before)
        neighbour, extent = disk.reserve(PAGE, STATES, "n"), disk.reserve(value.nbytes, STATES, "moments of block 3")
        other, into = noise(PAGE, 5), host().borrow(value.nbytes)
        disk.write(neighbour, other)
        monkeypatch.setattr(os, "pwritev", Flaky(os.pwritev, number, errno.EIO))
        with pytest.raises(OffloadError) as error:
            disk.write(extent, value)
        done = f"after {(number - 1) * 4 * PAGE:,} of" if number < 4 else f"after {12 * PAGE:,} of"
        for part in ("writing moments of block 3", str(disk.folder), done, "Input/output error", "checkpoints are as"):
            assert part in str(error.value)
        assert torch.equal(value, before)
        disk.write(extent, value)
        disk.read(extent, into)
        assert torch.equal(into, before)
        disk.read(neighbour, into[:PAGE])
        assert torch.equal(into[:PAGE], other)

    def test_a_read_that_fails(self, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
        extent, value = disk.reserve(100, STATES, "m"), noise(100)
        disk.write(extent, value)
        monkeypatch.setattr(os, "preadv", Flaky(os.preadv, 1, errno.EIO))
        into = torch.empty_like(value)
        with pytest.raises(OffloadError, match="failed in reading m, after 0 of 100 bytes: Input/output error"):
            disk.read(extent, into)
        disk.read(extent, into)
        assert torch.equal(value, into)

    def test_a_file_that_became_shorter(self, disk: Disk) -> None:
        extent = disk.reserve(2 * PAGE, STATES, "m")
        os.truncate(f"/proc/self/fd/{disk._file}", PAGE)
        with pytest.raises(OffloadError, match="after 4,096 of 8,192 bytes: the file ends there"):
            disk.read(extent, torch.empty(2 * PAGE, dtype=torch.uint8))

    def test_a_slow_disk(self, tmp_path: Path, ledger: Ledger, small_pieces: None) -> None:
        disk = Disk(tmp_path, ledger, timeout=0.0)
        disk.write(disk.reserve(PAGE, STATES, "one piece"), torch.zeros(PAGE, dtype=torch.uint8))
        with pytest.raises(OffloadError, match="after 16,384 of 36,864 bytes: slower than the 0 s of timeout"):
            disk.write(disk.reserve(9 * PAGE, STATES, "m"), torch.zeros(9 * PAGE, dtype=torch.uint8))

    def test_another_size(self, disk: Disk) -> None:
        with pytest.raises(AssertionError, match="99 bytes for"):
            disk.write(Extent(0, 100, "m"), noise(99))


def test_a_slab_is_the_file(disk: Disk, ledger: Ledger, tmp_path: Path) -> None:
    first = disk.slab(5000, torch.bfloat16, Category.PARAMETERS, "weights", padding=8)
    second = disk.slab(3, torch.float32, Category.PARAMETERS, "biases")
    assert not first.any() and first.data_ptr() % PAGE == 0
    first.copy_(torch.arange(5000))
    second.fill_(7)
    content = os.pread(disk._file, 10_000, 0)
    assert torch.equal(torch.frombuffer(bytearray(content), dtype=torch.bfloat16), first)
    account = ledger.account(Category.PARAMETERS, "disk")
    assert (account.current, account.padding) == (4 * PAGE, 4 * PAGE - 10_000 - 12 + 16)
    assert not list(tmp_path.rglob("zeroshard*"))
    disk.close()
    assert ledger.total("disk") == 0 and float(second.sum()) == 21
