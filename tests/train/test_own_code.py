"""The import of the user's classes and functions."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from zeroshard.errors import ModelError
from zeroshard.train.model import build_model, takes_tokens
from zeroshard.train.own_code import check_arguments, imported

BEGIN = "import torch\nfrom torch import nn\nfrom torch.nn import Linear\n\n"
ONE = BEGIN + "class Net(nn.Linear):\n    def __init__(self): super().__init__(2, 3)\n\ndef helper(): return 1\n"
TWO = ONE + "class Block(nn.Module): ...\n"
LANGUAGE = (
    BEGIN
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 4), nn.Linear(4, 32)

    def forward(self, tokens, targets=None):
        logits = self.head(self.embed(tokens))
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
)


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_file_stands_for_its_only_class_or_its_function_model() -> None:
    Path("own_one.py").write_text(ONE)
    assert imported("own_one.py").__name__ == "Net"
    Path("own_two.py").write_text(TWO + "def model(): return Net()\n")
    assert imported("own_two.py").__name__ == "model"


@pytest.mark.parametrize(
    "text, complaint",
    [
        (TWO, r"2 classes of modules and no function model; name one of .*\.py:Net, .*\.py:Block, .*\.py:helper"),
        ("def build(): ...\n", r"no class of modules and no function model; name one of .*:build"),
        ("import nowhere_to_be_found\ndef model(): ...\n", "cannot be imported .ModuleNotFoundError"),
    ],
)
def test_files_without_one_model(text: str, complaint: str, request: pytest.FixtureRequest) -> None:
    file = Path(f"own_{abs(hash(request.node.name))}.py")
    file.write_text(text)
    with pytest.raises(ModelError, match=complaint):
        imported(str(file))


def test_files_of_packages_and_of_other_folders() -> None:
    Path("own_pack").mkdir()
    Path("own_pack/__init__.py").touch()
    Path("own_pack/size.py").write_text("WIDTH = 5\n")
    Path("own_pack/net.py").write_text("from .size import WIDTH\ndef model(): return WIDTH\n")
    assert imported("own_pack/net.py")() == 5
    Path("aside").mkdir()
    Path("aside/own_aside.py").write_text("def model(): return 7\n")
    assert imported("aside/own_aside.py")() == imported("aside/own_aside.py:model")() == 7


def test_a_file_whose_name_is_taken() -> None:
    Path("json.py").write_text("def model(): ...\n")
    with pytest.raises(ModelError, match=r"another module has the name json .*rename the file json.py"):
        imported("json.py")


def test_classes_with_arguments_are_refused() -> None:
    with pytest.raises(ModelError, match="net:Linear needs the arguments in_features, out_features; name a function"):
        check_arguments("net:Linear", nn.Linear)
    check_arguments("net:Identity", nn.Identity)


def test_a_language_model_of_ones_own_trains_on_text() -> None:
    Path("own_language.py").write_text(LANGUAGE)
    built = build_model("own_language.py", 32, 8)
    assert (built.parameters, built.hugging_face, built.name) == (4 * 32 + 4 * 32 + 32, False, "own_language.py")
    assert takes_tokens(nn.Linear(1, 1)) is None
    Path("own_other.py").write_text(LANGUAGE.replace("targets=None", "labels=None").replace("targets", "labels"))
    with pytest.raises(
        ModelError, match=r"a Net, whose forward takes tokens, labels; a language model takes tokens and"
    ):
        build_model("own_other.py", 32, 8)
    with pytest.raises(ModelError, match="whose code sets its own"):
        build_model("own_language.py", 32, 8, dropout=0.1)
