"""Libraries are built once into the cache, and what cannot be built is named."""

import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard.kernels import build

FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel that adds one, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "one_more.cpp"
    path.write_text('extern "C" int one_more(int x) { return x + 1; }\n')
    return path


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_a_library_is_built_once_and_anew_where_its_source_a_header_or_flags_change(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.library(source, FLAGS).one_more(41) == 42
    with monkeypatch.context() as patch:
        patch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
        assert build.library(source, FLAGS).one_more(1) == 2
    assert build.library(source, (*FLAGS, "-DUNUSED=1")).one_more(1) == 2
    source.write_text('#include "two.h"\nextern "C" int one_more(int x) { return x + TWO; }\n')
    for value in (2, 5):
        (tmp_path / "two.h").write_text(f"#define TWO {value}\n")
        assert build.library(source, FLAGS).one_more(1) == 1 + value
    assert len(list((tmp_path / "cache" / "zeroshard").glob("one_more-*.so"))) == 4


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_a_source_that_does_not_compile_is_named_with_the_compilers_words(source: Path) -> None:
    source.write_text("this is not C++;")
    with pytest.raises(OSError, match=r"could not build the kernel one_more: (.|\n)*error"):
        build.library(source, FLAGS)


def test_without_a_compiler_those_that_were_looked_for_are_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(OSError, match=r"No C\+\+ compiler was found \(no-such-compiler\). Install one."):
        build.library(source, FLAGS)


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_of_several_processes_one_builds(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of this test notes each of its calls, and takes its time."""
    slow = tmp_path / "slow-c++"
    slow.write_text(f'#!/bin/sh\necho called >> "{tmp_path}/calls"\nsleep 0.3\nexec {build.compiler()} "$@"\n')
    slow.chmod(0o755)
    program = (
        "import sys; from pathlib import Path; from zeroshard.kernels import build\n"
        f"build.compiler = lambda: {str(slow)!r}\n"
        f"assert build.library(Path({str(source)!r}), {FLAGS!r}).one_more(41) == 42"
    )
    running = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    assert (tmp_path / "calls").read_text().split() == ["called"]
