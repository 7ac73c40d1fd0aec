"""Mutants of zeroshard without one of its waits: each place by the syntax tree, put into a running process."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper.plans import PLANS
from paper.runs import run

import zeroshard as zs

SOURCE = Path(zs.__file__).parent
WAITS = {"wait", "wait_on_host", "wait_in_stream", "wait_event", "synchronize", "finish_stream", "record_event",
         "result"}  # fmt: skip
EVENTS = {"record", "record_event"}


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


class _Without(ast.NodeTransformer):
    """Puts in place of a call that which it is called on, or the truth; in place of a new event, none."""

    def __init__(self, mutant: Mutant) -> None:
        self._place = mutant.line, mutant.column

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (node.end_lineno, node.end_col_offset) != self._place or not _waits(node):
            return self.generic_visit(node)
        assert isinstance(node.func, ast.Attribute)
        if node.func.attr in EVENTS:
            return ast.copy_location(ast.Constant(None), node)
        if isinstance(node.func.value, ast.Call):
            return node.func.value
        return ast.copy_location(ast.Constant(True), node)


@contextmanager
def put_in(mutant: Mutant) -> Iterator[None]:
    """Run the mutant inside, in place of the function that it changes."""
    path = SOURCE / mutant.file
    tree = ast.fix_missing_locations(_Without(mutant).visit(ast.parse(path.read_text())))
    code: Any = compile(tree, str(path), "exec")
    found: Any = importlib.import_module("zeroshard." + ".".join(Path(mutant.file).with_suffix("").parts))
    for name in mutant.function.split("."):
        code = next(each for each in code.co_consts if inspect.iscode(each) and each.co_name == name)
        found = vars(found)[name]
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or inspect.unwrap(found)
    kept, found.__code__ = found.__code__, code
    try:
        yield
    finally:
        found.__code__ = kept


def reports(mesh: zs.Mesh, mutant: Mutant, plan: str) -> str:
    """The first finding under a plan; empty if nothing was found. Errors of the run are raised."""
    with put_in(mutant):
        seen = run(mesh, PLANS[plan])
    return seen.findings[0].partition("\n")[0] if seen.findings else ""
