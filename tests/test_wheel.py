"""The wheel: it has every file of the package, and an installation of it builds the kernels from its own sources."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import zeroshard as zs

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
OFFLINE = ["--no-deps", "--no-index"]
BUILD = "import sys; from setuptools.build_meta import build_wheel as build; build(sys.argv[1])"  # as pip does
FROM_THE_WHEEL = """
import json, torch
from zeroshard.saved.codes.kernels import SOURCE, Kernels
from zeroshard.rng import philox
from zeroshard.optim.host import adafactor as host_adafactor
from zeroshard.optim.host import adam as host_adam
flags = torch.tensor([True, False, True])
packed, back = torch.zeros(1, dtype=torch.uint8), torch.zeros(3, dtype=torch.bool)
library = Kernels()
library.call("pack_bits", flags, 3, packed)
library.call("unpack_bits", packed, 3, back)
sources = [SOURCE, philox.SOURCE, host_adafactor.SOURCE, host_adam.SOURCE]
print(json.dumps({"sources": [str(path) for path in sources if path.is_file()], "back": back.tolist()}))
"""


def tracked() -> list[str]:
    """The files that git tracks and that a wheel is built from, as they lie in the folder of work."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "src", "pyproject.toml", "README.md", "LICENSE"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).exists()]


def run(words: Sequence[str], folder: Path, **variables: str) -> str:
    """What a command prints; its errors fail the test."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from a copy of the tracked files."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "copy" / name)
    run([sys.executable, "-c", BUILD, str(folder)], folder / "copy")
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    there = {name.removeprefix("src/") for name in tracked() if name.startswith("src/zeroshard/")}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == there and len(there) > 300


def test_an_installation_runs_from_its_own_files(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "site"
    run([*PIP, "install", "--quiet", "--no-compile", *OFFLINE, "--target", str(place), str(wheel)], tmp_path)
    found = json.loads(run([sys.executable, "-c", FROM_THE_WHEEL], tmp_path, PYTHONPATH=str(place)))
    assert len(found["sources"]) == 4 and all(Path(path).is_relative_to(place) for path in found["sources"])
    assert found["back"] == [True, False, True]
    version = run([sys.executable, "-m", "zeroshard", "--version"], tmp_path, PYTHONPATH=str(place))
    assert zs.__version__ in version
    words = [sys.executable, "-m", "zeroshard", "doctor", "--quick", "--json"]
    checked = json.loads(run(words, tmp_path, PYTHONPATH=str(place), XDG_CACHE_HOME=str(tmp_path / "cache")))
    subjects = {finding["subject"]: finding for finding in checked["findings"]}
    assert {"Python", "torch", "GPU", "memory", "cores", "compiler", "disk"} <= subjects.keys()
    assert subjects["torch"]["found"] == f"torch {torch.__version__}" and checked["profile"] is None


def test_readme_and_docs_begin_with_one_line_to_install() -> None:
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/index.md", "docs/quickstart.md")]
    lines = [re.findall(r"^ *(pip install .*?) *#", page, re.MULTILINE) for page in pages]
    assert lines == [["pip install .", 'pip install "git+$REPOSITORY"']] * 3, (
        "a release changes the same line everywhere"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page in pages[:2]:
        assert project["requires-python"] == ">=3.11" and "Python 3.11 or newer" in page
        assert "torch>=2.13" in project["dependencies"] and "PyTorch 2.13 or newer" in page
