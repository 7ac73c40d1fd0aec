"""The identity of a task as text: equal texts make equal rehearsals, so that an answer can stand for both.

The text covers a value and all that it holds: modules with their attributes, shapes of tensors and not their values,
functions with their closures and with the values at the top of their modules. Code counts by the time of change of its
file, for every loaded file of the user.
"""

import enum
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
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
        return repr((*map(walk.text, values), user_files()))
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

    def text(self, value: Any) -> str:
        """The text of a value; of one that was seen before, its number."""
        if isinstance(value, PLAIN):
            return repr(value)
        if id(value) in self._seen:
            return f"#{self._seen[id(value)]}"
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return f"{self._kind(value)}({self._content(value)})"

    def _kind(self, value: Any) -> str:
        """The class of a value; of one of the user's, with its code."""
        return self.text(type(value)) if _is_user(type(value).__module__) else _named(type(value))

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
        if isinstance(value, (ModuleType, BuiltinFunctionType)):
            return _named(value)
        if isinstance(value, type):
            members = vars(value).values() if _is_user(value.__module__) else ()
            return _named(value) + self._texts(*value.__bases__, *filter(_in_class, map(_unwrapped, members)))
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            used = list(_globals_of(value)) if _is_user(value.__module__) else []
            return _named(value) + self._texts(value.__defaults__, value.__kwdefaults__, cells, used)
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


def _named(value: Any) -> str:
    """The name of a class, a function or a module.

    Raises:
        _Unknown: its code lies in no file.
    """
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or "builtins"
    if module == "__main__" and _file_of(sys.modules[module]) is None:
        raise _Unknown(module)
    return f"{module}.{getattr(value, '__qualname__', '')}"


def _unwrapped(member: Any) -> Any:
    """The function of a method, a property or the like."""
    return getattr(member, "__func__", None) or getattr(member, "fget", None) or member


def _in_class(member: Any) -> bool:
    """Whether a member of a class of the user is code or a plain value of the user's."""
    return isinstance(member, PLAIN) or (isinstance(member, (FunctionType, type)) and _is_user(member.__module__))


def _globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The plain values, functions and classes of the user at the top of the module that a function names."""
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for name in sorted({name for code in codes for name in code.co_names}):
        value = function.__globals__.get(name, function)
        if value is not function and _in_class(value):
            yield name, value


def _is_user(module: str | None) -> bool:
    """Whether a module is neither of Python's libraries nor of this package."""
    path = _file_of(sys.modules.get(module or ""))
    return path is not None and not path.startswith((*LIBRARIES, ROOT))


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]


def _file_of(module: ModuleType | None) -> str | None:
    """The file of a module that exists."""
    named = getattr(module, "__file__", None)
    return _real(named) if isinstance(named, str) else None


@cache
def _real(path: str) -> str | None:
    found = Path(path).resolve()
    return str(found) if found.is_file() else None
