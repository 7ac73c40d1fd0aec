"""Philox gives the published words, and the kernel those of the definition in torch's operations."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.kernels import build
from zeroshard.rng import philox
from zeroshard.rng.philox import Elements, blocks, random_bits

CPU = torch.device("cpu")
KNOWN = {  # counter and key, and the words after ten rounds: kat_vectors of Random123, the authors' library
    "zeros": ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


def by_hand(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """One block in Python's integers, after the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * c[0], 2**32), divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


@pytest.mark.parametrize("name", KNOWN)
def test_published_vectors(name: str) -> None:
    counter, (low, high), wanted = KNOWN[name]
    assert by_hand(counter, (low, high)) == wanted
    found = blocks(tuple(torch.tensor([word]) for word in counter), low + (high << 32))  # type: ignore[arg-type]
    assert tuple(int(word) for word in found) == wanted


def test_the_published_vector_of_zeros_comes_out_as_words_of_elements() -> None:
    found = random_bits(0, 0, Elements(1, 1, 4), CPU)
    assert tuple(word % 2**32 for word in found.flatten().tolist()) == KNOWN["zeros"][2]


ELEMENTS = st.builds(
    Elements,
    outer=st.integers(0, 3),
    rows=st.integers(0, 3),
    inner=st.sampled_from([0, 1, 3, 4, 5, 255, 256, 257, 1030]),
    first=st.sampled_from([0, 1, 2, 3, 4, 2**20 + 1, 2**34 - 6]),
    row=st.sampled_from([0, 7, 2**32 - 2]),
    runs=st.integers(0, 3),
    stride=st.sampled_from([0, 1, 5, 256, 1031, 2**33]),
)


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
@settings(derandomize=True, max_examples=60, deadline=None)
@given(elements=ELEMENTS, key=st.integers(0, 2**64 - 1), step=st.integers(0, 2**32 - 1))
def test_the_kernel_draws_the_words_of_the_definition(elements: Elements, key: int, step: int) -> None:
    found = random_bits(key, step, elements, CPU)
    assert found.shape == (elements.outer, elements.rows, elements.runs, elements.inner) and found.dtype == torch.int32
    assert torch.equal(found, philox._in_torch(key, step, elements, CPU))


@settings(derandomize=True, max_examples=30, deadline=None)
@given(elements=ELEMENTS, key=st.integers(0, 2**64 - 1), step=st.integers(0, 2**32 - 1))
def test_each_element_has_the_word_of_its_own_counter(elements: Elements, key: int, step: int) -> None:
    found = random_bits(key, step, elements, CPU)
    last = (elements.outer - 1, elements.rows - 1, elements.runs - 1, elements.inner - 1)
    for o, r, k, i in {(0, 0, 0, 0), last}:
        if found.numel():
            e = elements.first + (o * elements.runs + k) * (elements.stride or elements.inner) + i
            counter = (e // 4 % 2**32, e // 4 >> 32, (elements.row + r) % 2**32, step)
            assert int(found[o, r, k, i]) % 2**32 == by_hand(counter, (key % 2**32, key >> 32))[e % 4]


def test_many_blocks_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for stride in (0, 97, 99, 200):
        elements = Elements(outer=2, rows=3, inner=97, first=2, runs=5, stride=stride)
        wanted = philox._in_torch(5, 6, elements, CPU)
        for at_once in (12, 100, 200):
            with monkeypatch.context() as patch:
                patch.setattr(philox, "AT_ONCE", at_once)
                assert torch.equal(philox._in_torch(5, 6, elements, CPU), wanted)


def test_words_look_random() -> None:
    found = random_bits(1, 2, Elements(1, 4, 2**16), CPU).flatten().long() % 2**32
    assert abs(float(found.double().mean()) / 2**31 - 1) < 0.007  # six standard deviations
    for bit in range(32):
        assert abs(float((found >> bit & 1).double().mean()) - 0.5) < 0.006
    assert found.unique().numel() > 2**18 - 2**10


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in a process that has built nothing and starts with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    philox._kernel.cache_clear()
    yield
    philox._kernel.cache_clear()


@pytest.mark.usefixtures("unbuilt")
def test_without_a_compiler_the_words_are_the_same_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    elements = Elements(2, 2, 9, 3)
    with pytest.warns(UserWarning, match=r"Exact random numbers.*No C\+\+ compiler") as caught:
        found = random_bits(1, 2, elements, CPU)
    assert torch.equal(random_bits(1, 2, elements, CPU), found) and len(caught) == 1
    assert torch.equal(found, philox._in_torch(1, 2, elements, CPU))


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_a_kernel_with_other_words_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "philox.cpp"
    wrong.write_text(philox.SOURCE.read_text().replace("0xBB67AE85u", "0xBB67AE87u"))
    monkeypatch.setattr(philox, "SOURCE", wrong)
    with pytest.warns(UserWarning, match="not those of Philox"):
        assert philox._kernel() is None
