"""The identity of a task as text: equal texts make equal rehearsals, so that an answer can stand for both.

The text covers a value and all that it holds: modules with their attributes, shapes of tensors and not their values,
functions with their closures. Code counts by the time of change of its file, for every loaded file of the user.
"""

import enum
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from zeroshard.planner.predict.torch_internals import is_fake

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size, range)
LIBRARIES = tuple(
    dict.fromkeys(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib"))
)
ROOT = str(Path(__file__).parents[2].resolve())  # of this package, whose version is part of every key
ADDRESS = " at 0x"  # in texts of objects that say nothing of their content
STATED = ("builtins", "torch", "pathlib", "decimal", "datetime")  # modules of objects whose texts have all of it


class _Unknown(Exception):
    """A value has no text of its content."""


def identity_of(*values: Any) -> str:
    """The text; empty where a value has content without a text, or code without a file."""
    walk = _Walk()
    try:
        return repr((*(walk.text(value) for value in values), walk.constants(), user_files()))
    except (_Unknown, RecursionError, ValueError):  # of an empty cell of a closure
        return ""


def user_files() -> list[tuple[str, int, int]]:
    """The loaded files outside of Python's libraries and this package, with time of change and size."""
    found = []
    for module in list(sys.modules.values()):
        path = _file_of(module)
        if path is not None and not path.startswith((*LIBRARIES, ROOT)):
            state = Path(path).stat()
            found.append((path, state.st_mtime_ns, state.st_size))
    return sorted(found)


class _Walk:
    """The texts of values that may hold each other."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no two have one id
        self._modules: dict[str, None] = {}

    def text(self, value: Any) -> str:
        """The text of a value; of one that was seen before, its number."""
        if isinstance(value, PLAIN):
            return repr(value)
        if id(value) in self._seen:
            return f"#{self._seen[id(value)]}"
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return f"{self._kind(value)}({self._content(value)})"

    def constants(self) -> str:
        """The plain values at the top of the user's modules that define a class or a function of the values."""
        found = []
        for module in filter(self._is_user, sorted(self._modules)):
            held = vars(sys.modules[module]).items()
            found.append((module, sorted((name, repr(one)) for name, one in held if isinstance(one, PLAIN))))
        return repr(found)

    def _content(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            marks = "" if is_fake(value) else self._items(vars(value))
            return f"{tuple(value.shape)} {value.dtype} {value.requires_grad} {value.is_meta} {marks}"
        if isinstance(value, Mapping):
            return self._items(value)
        if isinstance(value, (list, tuple, deque)):
            return ", ".join(map(self.text, value))
        if isinstance(value, (set, frozenset)):
            return ", ".join(sorted(map(self.text, value)))
        if isinstance(value, partial):
            return self._texts(value.func, value.args, value.keywords)
        if isinstance(value, MethodType):
            return self._texts(value.__self__, value.__func__)
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, (type, ModuleType, BuiltinFunctionType)):
            return self._named(value)
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return self._named(value) + self._texts(value.__defaults__, value.__kwdefaults__, *cells)
        return self._attributes(value)

    def _attributes(self, value: Any) -> str:
        slots = [name for kind in type(value).__mro__ for name in _slots_of(kind) if hasattr(value, name)]
        held = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}
        if held or hasattr(value, "__dict__"):
            return self._items(held)
        said = repr(value)
        if ADDRESS in said or type(value).__module__ not in STATED:
            raise _Unknown(said)
        return said

    def _items(self, items: Mapping[Any, Any]) -> str:
        return ", ".join(f"{self.text(name)}: {self.text(value)}" for name, value in items.items())

    def _texts(self, *values: Any) -> str:
        return "; ".join(map(self.text, values))

    def _kind(self, value: Any) -> str:
        return self._named(type(value))

    def _named(self, value: Any) -> str:
        """The name of a class, a function or a module, whose code lies in a file."""
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or "builtins"
        self._modules[module] = None
        if module == "__main__" and _file_of(sys.modules[module]) is None:
            raise _Unknown(module)
        return f"{module}.{getattr(value, '__qualname__', '')}"

    def _is_user(self, module: str) -> bool:
        path = _file_of(sys.modules.get(module))
        return path is not None and not path.startswith((*LIBRARIES, ROOT))


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]


def _file_of(module: ModuleType | None) -> str | None:
    """The file of a module that exists."""
    named = getattr(module, "__file__", None)
    path = Path(named).resolve() if isinstance(named, str) else None
    return str(path) if path is not None and path.is_file() else None
