"""The names of models and functions on the command line, checked without an import of torch or of the user's code.

`--model` takes a built-in size (`tiny`), a Hugging Face configuration (`config.json` or its folder), or code of the
user: a file (`mine.py`, `mine.py:Net`) or a module (`package.module:function`). `zeroshard.train.own_code` imports it.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from zeroshard.errors import ModelError
from zeroshard.train.sizes import SIZES

FORMS = "mine.py, mine.py:Net or package.module:function"
WAYS = f"the path of a config.json, or code of your own: {FORMS}"
MODEL, BATCH = "model", "batch"  # functions of a file that are taken where none is named
NAMED = 6  # most names in an error


@dataclass(frozen=True, slots=True)
class Code:
    """A class or function of the user's code.

    Attributes:
        text: as it was typed.
        module: its dotted name, importable from `folder`.
        folder: that belongs on `sys.path`.
        name: of the class or function, dotted within the module; empty where none was typed.
        file: that holds it; None for a module that is found elsewhere than in a folder of the user.
    """

    text: str
    module: str
    folder: Path
    name: str
    file: Path | None

    def beside(self, name: str) -> "Code | None":
        """Another function of the same file; None if the file defines none of that name."""
        defined = None if self.file is None else defined_in(self.file)
        if defined is None or name not in defined:
            return None
        return Code(f"{self.text.partition(':')[0]}:{name}", self.module, self.folder, name, self.file)


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The meaning of a value of `--model`.

    Attributes:
        kind: of the model.
        file: of the configuration.
        code: of the user.
    """

    kind: Literal["size", "configuration", "code"]
    file: Path | None = None
    code: Code | None = None


def model_named(text: str) -> NamedModel:
    """The model that `--model` names.

    Raises:
        ModelError: there is no such size, file, class or function.
    """
    if text in SIZES:
        return NamedModel("size")
    if not text.strip():
        raise ModelError(f"model={text!r} names no model; the sizes are {', '.join(SIZES)}, or give {WAYS}.")
    code = code_named(text)
    if code is not None:
        return NamedModel("code", code=code)
    path = Path(text)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file() and file.suffix != ".py":
        return NamedModel("configuration", file=file)
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"model names {text}, which holds adapters of peft alone; give the folder of their base. In Python, "
            f"zs.from_pretrained(BASE, ..., adapters={text!r}) trains them further."
        )
    if path.is_dir() or path.suffix == ".json":
        raise ModelError(f"model names {file}, which does not exist{_meant(text)}; give {WAYS}.")
    hub = ""
    if text.count("/") == 1 and not path.parent.exists():
        hub = " A name on a model hub is not looked up: download its config.json, and give its path."
    near = _near(text)
    meant = f"did you mean {' or '.join(near)}? The" if near else "the"
    raise ModelError(f"model={text} names no model; {meant} sizes are {', '.join(SIZES)}, or give {WAYS}.{hub}")


def has_weights(text: str) -> bool:
    """Whether `--model` names a folder with safetensors files."""
    return text not in SIZES and Path(text).is_dir() and any(Path(text).glob("*.safetensors"))


def is_code(text: str) -> bool:
    """Whether a text is spelt as a class or function of the user's code; files are not looked up but to exclude one."""
    return text.partition(":")[0].endswith(".py") or (":" in text and not Path(text).exists())


def code_named(text: str) -> Code | None:
    """The class or function that `FILE.py`, `FILE.py:NAME` or `MODULE:NAME` names; None for other texts.

    Raises:
        ModelError: the file, the module or the name in it does not exist.
    """
    if not is_code(text):
        return None
    place, _, name = text.partition(":")
    if place.endswith(".py"):
        return _of_file(text, Path(place), name)
    if not name or not all(part.isidentifier() for part in (*place.split("."), *name.split("."))):
        raise ModelError(f"{text!r} names no class or function; write {FORMS}.")
    file = Path(*place.split(".")).with_suffix(".py")
    if file.is_file():
        _check_defined(text, file, name)
        return Code(text, place, Path.cwd(), name, file.resolve())
    if not _is_importable(place.partition(".")[0]):
        raise ModelError(
            f"{text} cannot be imported: there is no module {place.partition('.')[0]}{_meant(place)}; write {FORMS}, "
            f"of a module that Python finds from {Path.cwd()}."
        )
    return Code(text, place, Path.cwd(), name, None)


def defined_in(file: Path) -> list[str] | None:
    """The names that a file binds at its top level; None if some are bound by `from ... import *` or only in a run.

    Raises:
        ModelError: the file cannot be read, or is no Python.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        reason = f"{error.msg}, line {error.lineno}" if isinstance(error, SyntaxError) else error
        raise ModelError(f"{file} cannot be read as Python ({reason}); correct it there.") from error
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        else:
            names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            names += [n.name for n in ast.walk(node) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    return None if "*" in names else names


def listed(names: Iterable[str]) -> str:
    """Names in a sentence, the first few of many."""
    chosen = list(names)
    more = f" and {len(chosen) - NAMED} more" if len(chosen) > NAMED else ""
    return ", ".join(chosen[:NAMED]) + more


def _of_file(text: str, path: Path, name: str) -> Code:
    if not path.is_file():
        raise ModelError(f"{text} names the file {path}, which does not exist{_meant(str(path))}; give {WAYS}.")
    _check_defined(text, path, name)
    file = path.resolve()
    folder, dotted = file.parent, file.stem
    while (folder / "__init__.py").exists():  # a file of a package, whose imports may be relative
        folder, dotted = folder.parent, f"{folder.name}.{dotted}"
    return Code(text, dotted.removesuffix(".__init__"), folder, name, file)


def _check_defined(text: str, file: Path, name: str) -> None:
    names = defined_in(file)
    first = name.partition(".")[0]
    if names is None or first in names:
        return
    defines = _classes_and_functions(file)
    if not name and defines:
        return
    if not defines:
        raise ModelError(f"{text}: {file} defines no class and no function; a model is made by one of them.")
    near = get_close_matches(first, defines, n=1)
    meant = f"did you mean {near[0]}? It" if near else "it"
    raise ModelError(f"{text}: {file} has no attribute {first!r}; {meant} defines {listed(defines)}.")


def _classes_and_functions(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = ast.ClassDef | ast.FunctionDef
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def _is_importable(name: str) -> bool:
    if (Path(name) / "__init__.py").exists() or Path(name).is_dir() or name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _meant(text: str) -> str:
    """The names like a text, as the end of a clause."""
    near = _near(text)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _near(text: str) -> list[str]:
    """Sizes and paths that are spelt like a text."""
    path = Path(text)
    folder = path.parent if path.parent.is_dir() else Path()
    beside: list[str] = []
    for found in sorted(folder.iterdir()) if folder.is_dir() else []:
        if found.suffix in (".py", ".json") or (found / "config.json").is_file():
            beside.append(str(found))
    alike = {name.casefold(): name for name in beside}
    stems = {Path(name).stem.casefold(): name for name in beside}
    near = [stems[path.name.casefold()]] if path.name.casefold() in stems else []
    near += get_close_matches(text.casefold(), SIZES, n=1)
    for spelt in (text.casefold(), path.name.casefold()):
        near += [alike[found] for found in get_close_matches(spelt, alike, n=2)]
    return list(dict.fromkeys(near))
