"""The import of classes and functions of the user's code that options name."""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from zeroshard.errors import ModelError
from zeroshard.train.named_models import FORMS, MODEL, Code, code_named, listed


def imported(text: str) -> Callable[..., Any]:
    """The class or function that `FILE.py:NAME` or `MODULE:NAME` names, or the model that `FILE.py` defines.

    A file without a name stands for its function `model`, or else for the one class of modules that it defines.

    Raises:
        ModelError: it cannot be imported, or is no class or function, or the file has several.
    """
    return import_code(named_code(text))


def named_code(text: str) -> Code:
    """The class or function that a text names.

    Raises:
        ModelError: it names none, or there is no such file or module.
    """
    code = code_named(text)
    if code is None:
        raise ModelError(f"{text!r} names no class or function; write {FORMS}.")
    return code


def import_code(code: Code) -> Callable[..., Any]:
    """The class or function at `code`; its folder stays on `sys.path`, where processes that are started find it too.

    Raises:
        ModelError: as `imported`.
    """
    module = _module_of(code)
    found: Any = module
    try:
        for part in (code.name or _only_model(code, module)).split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ModelError(f"{code.text} cannot be imported ({error}); write {FORMS}.") from error
    if isinstance(found, nn.Module):
        raise ModelError(f"{code.text} is a module that is already made; name its class or a function that makes it.")
    if not callable(found):
        raise ModelError(f"{code.text} is {type(found).__name__}; it must be a class or a function.")
    function: Callable[..., Any] = found
    return function


def maker_of(code: Code) -> Callable[[], nn.Module]:
    """A function that makes the module of the user's code.

    Raises:
        ModelError: as `import_code` and `check_arguments`; and when called, of a function that makes no module.
    """
    factory = import_code(code)
    check_arguments(code.text, factory)

    def made() -> nn.Module:
        module = factory()
        if not isinstance(module, nn.Module):
            raise ModelError(f"{code.text} returned {type(module).__name__}; it must return an nn.Module")
        return module

    return made


def check_arguments(text: str, factory: Callable[..., Any]) -> None:
    """Refuse a class or function that cannot be called without arguments.

    Raises:
        ModelError: with the arguments that it needs.
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of C, without a signature
        return
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in open_kinds]
    if needed:
        raise ModelError(
            f"{text} needs the arguments {listed(needed)}; name a function without arguments that makes the model."
        )


def _module_of(code: Code) -> ModuleType:
    if str(code.folder) not in sys.path:
        sys.path.insert(0, str(code.folder))
    try:
        module = importlib.import_module(code.module)
    except Exception as error:
        raise ModelError(
            f"{code.text} cannot be imported ({type(error).__name__}: {error}); write {FORMS}, of a module that Python "
            f"finds from {code.folder}."
        ) from error
    file = getattr(module, "__file__", None)
    if code.file is not None and file is not None and not code.file.samefile(file):
        raise ModelError(
            f"{code.text}: another module has the name {code.module} ({file}); rename the file {code.file.name}."
        )
    return module


def _only_model(code: Code, module: ModuleType) -> str:
    """The function `model` of a file, or the one class of modules that it defines."""
    if callable(getattr(module, MODEL, None)):
        return MODEL
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    classes = [one.__name__ for one in own if isinstance(one, type) and issubclass(one, nn.Module)]
    if len(classes) == 1:
        return classes[0]
    functions = [one.__name__ for one in own if inspect.isfunction(one) and not one.__name__.startswith("_")]
    found = f"{len(classes)} classes of modules" if classes else "no class of modules"
    candidates = [f"{code.text}:{name}" for name in classes + functions]
    way_out = f"name one of {listed(candidates)}" if candidates else "write one of the two, or name another file"
    raise ModelError(f"{code.text} has {found} and no function {MODEL}; {way_out}.")
