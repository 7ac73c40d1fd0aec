"""The source as the tests of the house read it: modules, definitions and imports."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "zeroshard"
Findings = Iterator[tuple[str, str]]


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

    @property
    def part(self) -> str:
        """The part of the house: the first word of the name."""
        return self.name.partition(".")[0]


@cache
def house() -> list[Module]:
    modules = []
    for path in sorted(SOURCE.rglob("*.py")):
        words = path.relative_to(SOURCE).with_suffix("").parts
        modules.append(Module.parse(".".join(words[:-1] if words[-1] == "__init__" else words), path.read_text()))
    return modules


Function = ast.FunctionDef | ast.AsyncFunctionDef


def definitions(module: Module) -> Iterator[tuple[str, Function | ast.ClassDef, list[ast.AST]]]:
    """Every function and class with its dotted name and what it stands in, outermost first."""

    def inside(
        node: ast.AST, name: str, above: list[ast.AST]
    ) -> Iterator[tuple[str, Function | ast.ClassDef, list[ast.AST]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (Function, ast.ClassDef)):
                yield f"{name}.{child.name}", child, above
                yield from inside(child, f"{name}.{child.name}", [*above, child])
            else:
                yield from inside(child, name, above)

    return inside(module.tree, module.name, [])


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
