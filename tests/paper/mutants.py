"""Mutants of zeroshard without one of its waits: each place by the syntax tree, put into a running process.

A wait is left out, and an event covers nothing. Collectives end at once in a mutant (`Paper(at_once=True)`), so that
values are there though no wait was: what is found is the order, and not what a race of gloo made of a run.
"""

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper.device import DEVICE
from paper.plans import PLANS
from paper.runs import run

import zeroshard as zs
from zeroshard.platform import accelerator

SOURCE = Path(zs.__file__).parent
EVENTS = {"record", "record_event"}
WAITS = {"wait", "wait_on_host", "wait_in_stream", "wait_event", "synchronize", "finish_stream", "record_event"}


@dataclass(frozen=True)
class Mutant:
    """One call that is left out.

    Attributes:
        file: below the package.
        line, column: of the call's end, which no two calls share.
        function: the outermost function around it, such as "Task.wait".
        text: of the call.
    """

    file: str
    line: int
    column: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.text}"


def mutants_of(file: str) -> Iterator[Mutant]:
    """The places of a file."""
    tree = ast.parse((SOURCE / file).read_text())
    for name, function in _functions(tree):
        for node in ast.walk(function):
            if _waits(node):
                assert isinstance(node, ast.Call)
                line, column = node.end_lineno or 0, node.end_col_offset or 0
                yield Mutant(file, line, column, name, ast.unparse(node))


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def _waits(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, holder = node.func.attr, node.func.value
    return name in WAITS or (name in EVENTS and isinstance(holder, ast.Name) and holder.id == "accelerator")


def uncovering() -> Any:
    """An event of the device of paper that covers nothing."""
    return accelerator._ask(DEVICE, "Event")()


_UNCOVERING = "__import__('paper.mutants', fromlist=['*']).uncovering()"
_REACHED = "__import__('paper.mutants', fromlist=['*']).REACHED.add"
REACHED: set[tuple[str, int, int]] = set()  # file, line and column of the calls of `reached_by`


class _Without(ast.NodeTransformer):
    """Puts in place of a call that which it is called on, or the truth; in place of a new event, an uncovering one."""

    def __init__(self, mutant: Mutant) -> None:
        self._place = mutant.line, mutant.column

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (node.end_lineno, node.end_col_offset) != self._place or not _waits(node):
            return self.generic_visit(node)
        assert isinstance(node.func, ast.Attribute)
        if node.func.attr in EVENTS:
            return ast.copy_location(ast.parse(_UNCOVERING, mode="eval").body, node)
        if isinstance(node.func.value, ast.Call):
            return node.func.value
        return ast.copy_location(ast.Constant(True), node)


class _Counted(ast.NodeTransformer):
    """Notes that a call is reached, before it."""

    def __init__(self, file: str) -> None:
        self._file = file

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not _waits(node):
            return node
        place = self._file, node.end_lineno, node.end_col_offset
        noted = ast.parse(f"({_REACHED}({place!r}), None)[1]", mode="eval").body
        assert isinstance(noted, ast.Subscript) and isinstance(noted.value, ast.Tuple)
        noted.value.elts[1] = node
        return ast.copy_location(noted, node)


@contextmanager
def put_in(changed: ast.NodeTransformer, file: str, functions: Iterable[str]) -> Iterator[None]:
    """Run changed code inside, in place of functions of a file."""
    path = SOURCE / file
    tree = ast.fix_missing_locations(changed.visit(ast.parse(path.read_text())))
    whole: Any = compile(tree, str(path), "exec")
    module: Any = importlib.import_module("zeroshard." + ".".join(Path(file).with_suffix("").parts))
    kept = []
    for function in functions:
        code, found = whole, module
        for name in function.split("."):
            code = next(each for each in code.co_consts if inspect.iscode(each) and each.co_name == name)
            found = vars(found)[name]
        found = getattr(found, "fget", None) or getattr(found, "__func__", None) or inspect.unwrap(found)
        kept.append((found, found.__code__))
        found.__code__ = code
    try:
        yield
    finally:
        for found, code in kept:
            found.__code__ = code


def reports(mesh: zs.Mesh, mutant: Mutant, plan: str) -> str:
    """The first finding under a plan; empty if nothing was found. Errors of the run are raised."""
    with put_in(_Without(mutant), mutant.file, [mutant.function]):
        seen = run(mesh, PLANS[plan], at_once=True)
    return seen.findings[0].partition("\n")[0] if seen.findings else ""


def reached_by(mesh: zs.Mesh, files: Mapping[str, Sequence[str]], plan: str) -> set[tuple[str, int, int]]:
    """File, line and column of the calls in `files`, each with the functions around them, that a plan reaches."""
    REACHED.clear()
    with ExitStack() as stack:
        for file, functions in files.items():
            stack.enter_context(put_in(_Counted(file), file, functions))
        run(mesh, PLANS[plan], at_once=True)
    return set(REACHED)
