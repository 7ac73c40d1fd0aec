"""Every block of Python on a page runs as it stands when it is pasted into an empty folder.

A comment before a block names what it needs besides: `<!-- test: given llama/, ranks 2 -->`. The words are `given`
(files of `docs_given.py`), `ranks 2` (two processes), `continues` (with the names of the block before it), `script` (a
process of its own), `whole` (with `--whole` alone) and `not run: REASON`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from docs_given import ROOT, give
from pool import Pool
from test_docs import FENCE, PAGES
from torch.distributed import all_reduce
from torch.distributed.distributed_c10d import ReduceOp

import zeroshard as zs

MARK = re.compile(r"<!-- test: (.*?) -->\n\Z")
WORDS = ("ranks 2", "continues", "script", "whole")
EXTRAS = ("accelerate", "peft", "transformers", "trl")


class Block(NamedTuple):
    """A block of Python on a page, what it is marked with, and the files that it takes."""

    page: Path
    line: int
    code: str
    marks: list[str]
    given: list[str]

    @property
    def name(self) -> str:
        """The page and the line at which it begins."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of Python on a page. Raises at a mark that has no meaning."""
    text = page.read_text()
    for fence in FENCE.finditer(text):
        if fence["language"].strip() == "python":
            before = text[: fence.start()]
            found = MARK.search(before)
            marks, given = [], []
            for word in found[1].split(", ") if found else ():
                if word in WORDS or word.startswith("not run: "):
                    marks.append(word)
                else:
                    given.append(word.removeprefix("given "))
            assert not given or "given " in found[1], f"{page.name}: {found[1]}"  # type: ignore[index]
            yield Block(page, before.count("\n") + 1, fence["code"], marks, given)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def joined(blocks: list[Block]) -> Iterator[tuple[Block, str]]:
    """Each block, and its code behind that of the blocks that it goes on with."""
    code = ""
    for block in blocks:
        code = code + block.code if "continues" in block.marks else block.code
        yield block, code


CODE = {block.name: code for page in PAGES for block, code in joined(list(blocks_of(page)))}


def chosen(*words: str, without: tuple[str, ...] = ()) -> list[Any]:
    """Blocks that have all of some marks and none of others, as cases of a test."""
    every = [block for block in BLOCKS if not any(mark.startswith("not run") for mark in block.marks)]
    found = [b for b in every if set(words) <= set(b.marks) and not set(without) & set(b.marks)]
    marks = {True: (pytest.mark.whole,), False: ()}
    return [pytest.param(b, id=b.name, marks=marks["whole" in b.marks]) for b in found]


def need_extras(block: Block) -> None:
    """Skip the test where a package is missing that a block imports."""
    for module in EXTRAS:
        if re.search(rf"^(?:from|import) {module}\b", block.code, re.MULTILINE):
            pytest.importorskip(module)


def run_here(block: Block, folder: Path) -> None:
    """Run a block in a folder, in this process."""
    give(block.given, folder)
    compiled = compile(CODE[block.name], block.name, "exec")
    with chdir(folder), patch.object(sys, "path", [str(folder), *sys.path]):
        sys.modules.pop("train", None)
        try:
            exec(compiled, {"__name__": "__main__"})
        finally:
            sys.modules.pop("train", None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("block", chosen(without=("ranks 2", "script")))
def test_a_block_runs_when_it_is_pasted(block: Block, tmp_path: Path) -> None:
    need_extras(block)
    run_here(block, tmp_path)


def all_reduce_in(mesh: zs.Mesh, tensor: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """`all_reduce` of torch over the ranks of a mesh by default: the pool has more."""
    return all_reduce(tensor, op, mesh.control if group is None else group, async_op)


def run_on_ranks(mesh: zs.Mesh, folder: str, names: list[str]) -> list[str]:
    """Run blocks one after the other on each rank; the folder has what each is given, in a folder of its number."""
    ran = []
    for number, name in enumerate(names):
        compiled = compile(CODE[name], name, "exec")
        place = Path(folder) / str(number)
        both = patch("torch.distributed.all_reduce", partial(all_reduce_in, mesh))
        with chdir(place), both, patch("zeroshard.engine.engine.shared_mesh", lambda _: mesh):
            exec(compiled, {"__name__": "__main__"})
        ran.append(name)
    return ran


def test_blocks_for_two_ranks_run(pool: Pool, tmp_path: Path) -> None:
    blocks = [case.values[0] for case in chosen("ranks 2", without=("whole",))]
    for number, block in enumerate(blocks):
        (tmp_path / str(number)).mkdir()
        give(block.given, tmp_path / str(number))
    names = [block.name for block in blocks]
    assert pool.run(run_on_ranks, 2, str(tmp_path), names) == [names, names] and names


@pytest.mark.parametrize("block", chosen("script"))
def test_a_script_runs(block: Block, tmp_path: Path) -> None:
    need_extras(block)
    give(block.given, tmp_path)
    (tmp_path / "mine.py").write_text(CODE[block.name])
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_few_blocks_are_left_out() -> None:
    left = [block.name for block in BLOCKS if any(mark.startswith("not run") for mark in block.marks)]
    assert len(left) <= 2 and len(BLOCKS) > 70
