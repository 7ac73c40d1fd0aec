"""Pickles read as data: every object becomes a record of its class's name, arguments and state, and no code runs.

Opcodes are taken apart by `pickletools`, which imports nothing that a pickle names. Containers, numbers and texts are
themselves. Opcodes that protocols 2 to 5 do not need for these are refused.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zeroshard.errors import CheckpointError

CONSTANTS = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "UNICODE"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
        *("SHORT_BINSTRING", "BINSTRING", "STRING"),
    )
)
NAMED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MARK = object()


@dataclass(slots=True, eq=False)
class PickledRecord:
    """An object of a pickle, or a class or function that is named there.

    Attributes:
        name: the dotted name of its class, or of the function that made it.
        args: the arguments; None for the class or function itself.
        state: as `__setstate__` would get it.
    """

    name: str
    args: Any = None
    state: Any = None


def read_records(content: bytes) -> Any:
    """The content of a pickle.

    Raises:
        CheckpointError: it is damaged, or holds an opcode that is not read.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes may raise any exception
        raise CheckpointError(f"it is no whole pickle ({type(error).__name__}: {error})") from error
    raise CheckpointError("it is no whole pickle")


class _Machine:
    """The stack and the memo of a pickle that is read."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        if name in CONSTANTS:
            self.stack.append(argument)
        elif name in NAMED:
            self.stack.append(NAMED[name])
        elif name in EMPTY:
            self.stack.append(EMPTY[name]())
        elif name in TUPLES:
            self.stack.append(tuple(self._take(TUPLES[name])))
        elif name == "MARK":
            self.stack.append(MARK)
        elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if argument is None else argument] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name not in ("PROTO", "FRAME"):
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        """Carry out an opcode that makes or fills a container or an object."""
        match name:
            case "TUPLE":
                self.stack.append(tuple(self._to_mark()))
            case "APPEND":
                self._take(1, self.stack[-2].append)
            case "APPENDS":
                items = self._to_mark()
                self.stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._take(2) if name == "SETITEM" else self._to_mark()
                self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "ADDITEMS":
                items = self._to_mark()
                self.stack[-1].update(items)
            case "GLOBAL" | "STACK_GLOBAL":
                parts = argument.split(" ") if name == "GLOBAL" else self._take(2)
                self.stack.append(PickledRecord(".".join(parts)))
            case "REDUCE" | "NEWOBJ":
                made, args = self._take(2)
                self.stack.append(PickledRecord(made.name, args))
            case "BUILD":
                (state,) = self._take(1)
                if isinstance(self.stack[-1], PickledRecord):
                    self.stack[-1].state = state
            case "BINPERSID":
                self.stack.append(PickledRecord("persistent", self._take(1)[0]))
            case _:
                raise CheckpointError(f"it holds {name}, which is not read")

    def _take(self, count: int, use: Callable[[Any], Any] | None = None) -> list[Any]:
        """The last values of the stack, in order; each is given to `use`."""
        if len(self.stack) < count:
            raise ValueError("an opcode without values")
        taken = self.stack[-count:]
        del self.stack[-count:]
        for value in taken if use is not None else ():
            use(value)  # type: ignore[misc]
        return taken

    def _to_mark(self) -> list[Any]:
        """The values after the last mark, which is removed too."""
        at = max(place for place, value in enumerate(self.stack) if value is MARK)
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken
