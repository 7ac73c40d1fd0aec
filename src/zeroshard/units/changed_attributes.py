"""Attributes of modules that a plan changes, such as sizes of layers and loss functions, and their old values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

KEY = "changed_attributes"  # an attribute of modules with such
ABSENT = object()


class Changed(dict[str, tuple[Any, Any]]):
    """The values before and after of the attributes of one module; a copy of the module has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Changed":
        return Changed()

    def __reduce__(self) -> tuple[Any, ...]:
        return Changed, ()


@contextmanager
def changing(model: nn.Module) -> Iterator[None]:
    """Note the attributes of a model's modules, and the modules in them, that are changed inside."""
    before = {module: _attributes(module) for module in model.modules()}
    yield
    for module, old in before.items():
        new, known = _attributes(module), vars(module).get(KEY, {})
        names = [name for name in {**old, **new} if old.get(name, ABSENT) is not new.get(name, ABSENT)]
        first = {name: known[name][0] if name in known else old.get(name, ABSENT) for name in names}
        if names:
            vars(module)[KEY] = Changed(known | {name: (first[name], new.get(name, ABSENT)) for name in names})


def change_back(module: nn.Module) -> None:
    """Set the attributes of a module that were changed to their old values, except those that changed again since."""
    now = _attributes(module)
    for name, (old, new) in vars(module).pop(KEY, {}).items():
        if now.get(name, ABSENT) is not new:
            continue
        if old is ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, old)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._modules}
