"""The source as the tests of the house read it: modules, definitions and imports."""

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "zeroshard"
Findings = Iterator[tuple[str, str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Defined = tuple[str, Function | ast.ClassDef, list[ast.AST]]  # dotted name, and the definitions around it


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name below zeroshard, its text and its tree."""

    name: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, name: str, text: str) -> "Module":
        return cls(name, text, ast.parse(text))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def definitions(self) -> list[Defined]:
        """Every function and class, outermost first."""
        return list(_inside(self.tree, self.name, []))

    @property
    def part(self) -> str:
        """The part of the house: the first word of the name."""
        return self.name.partition(".")[0]


@cache
def house() -> list[Module]:
    """All modules of the package, which garbage collections leave out: their trees have half a million nodes."""
    modules = []
    gc.disable()
    for path in sorted(SOURCE.rglob("*.py")):
        words = path.relative_to(SOURCE).with_suffix("").parts
        modules.append(Module.parse(".".join(words[:-1] if words[-1] == "__init__" else words), path.read_text()))
        _ = modules[-1].nodes, modules[-1].definitions
    gc.freeze()
    gc.enable()
    return modules


def _inside(node: ast.AST, name: str, above: list[ast.AST]) -> Iterator[Defined]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (Function, ast.ClassDef)):
            yield f"{name}.{child.name}", child, above
            yield from _inside(child, f"{name}.{child.name}", [*above, child])
        elif not isinstance(child, ast.expr):
            yield from _inside(child, name, above)


def last_word(node: ast.AST) -> str:
    """What a name or an attribute ends with."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def imports(module: Module) -> Iterator[str]:
    """The dotted names that a module imports, anywhere in it, strings included; `from a import b` as a.b."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module.name} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and last_word(node.func) in ("import_module", "__import__"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
