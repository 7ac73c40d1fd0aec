"""Names of models as people type them, looked up without an import of torch or of the user's code."""

from pathlib import Path

import pytest

from zeroshard.errors import ModelError
from zeroshard.train.named_models import code_named, defined_in, model_named
from zeroshard.train.sizes import SIZES

BROKEN = "raise RuntimeError\n"  # nothing here is run
FILE = (
    f"{BROKEN}import os\nfrom a import b as c\n\nclass Net: ...\nclass _Hidden: ...\n\ndef build(): ...\n\nx = y = 1\n"
)


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)
    Path("pack/inner").mkdir(parents=True)
    for name in ("pack/__init__.py", "pack/inner/__init__.py"):
        Path(name).touch()
    Path("pack/inner/net.py").write_text(FILE)
    Path("llama-7b").mkdir()
    Path("llama-7b/config.json").write_text("{}")


def test_sizes_and_configurations() -> None:
    assert all(model_named(name).kind == "size" for name in SIZES)
    assert model_named("llama-7b") == model_named("llama-7b/config.json")
    assert model_named("llama-7b").file == Path("llama-7b/config.json")


@pytest.mark.parametrize(
    "typed, module, name",
    [
        ("mine.py", "mine", ""),
        ("mine.py:Net", "mine", "Net"),
        ("mine:Net.small", "mine", "Net.small"),
        ("./mine.py:c", "mine", "c"),
        ("pack/inner/net.py:build", "pack.inner.net", "build"),
        ("pack.inner.net:x", "pack.inner.net", "x"),
        ("json:loads", "json", "loads"),
    ],
)
def test_code_of_the_user(typed: str, module: str, name: str) -> None:
    code = model_named(typed).code
    assert code is not None and (code.text, code.module, code.name) == (typed, module, name)
    assert code.folder == Path.cwd()


def test_another_function_of_the_same_file() -> None:
    code = code_named("mine.py")
    assert code is not None
    beside = code.beside("build")
    assert beside is not None and (beside.text, beside.name) == ("mine.py:build", "build")
    assert code.beside("batch") is None


@pytest.mark.parametrize(
    "typed, complaint",
    [
        ("llama", r"model=llama names no model; did you mean llama-7b\? The sizes are tiny, .*mine.py:Net"),
        ("mine", r"did you mean mine.py\?"),
        ("miine.py", r"names the file miine.py, which does not exist \(did you mean mine.py\?\)"),
        ("tinny", r"did you mean tiny\?"),
        ("meta-llama/Llama-2-7b", r"did you mean llama-7b\? .*A name on a model hub is not looked up: download"),
        ("other.json", r"names other.json, which does not exist"),
        ("pack", r"names pack/config.json, which does not exist"),
        ("adapter", r"model names adapter, which holds adapters of peft alone; give the folder of their base"),
        ("mine.py:Nett", r"has no attribute 'Nett'; did you mean Net\? It defines Net, build"),
        ("mine:nothing", r"has no attribute 'nothing'; it defines Net, build"),
        ("nowhere.module:Net", r"there is no module nowhere"),
        ("mine.py:", "."),
        ("mine:", "names no class or function; write mine.py, mine.py:Net or package.module:function"),
        ("empty.py", r"empty.py defines no class and no function"),
        ("torn.py", r"torn.py cannot be read as Python \(.*line 1"),
    ],
)
def test_names_that_name_nothing(typed: str, complaint: str) -> None:
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    Path("empty.py").write_text("x = 1\n")
    Path("torn.py").write_text("def (\n")
    if typed == "mine.py:":
        assert model_named(typed).kind == "code"  # as mine.py
        return
    with pytest.raises(ModelError, match=complaint):
        model_named(typed)


def test_names_that_a_file_binds() -> None:
    file = Path("mine.py")
    assert defined_in(file) == ["os", "c", "Net", "_Hidden", "build", "x", "y"]
    file.write_text("if 1:\n    def later(): ...\nfor i in []: ...\n")
    assert defined_in(file) == ["i", "later"] or defined_in(file) == ["later", "i"]
    file.write_text("from os import *\n")
    assert defined_in(file) is None
    assert model_named("mine.py:path").kind == "code"  # only the import can show it
