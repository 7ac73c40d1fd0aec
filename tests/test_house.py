"""The rules of the house, counted over the source: its budgets, its docstrings, and which floor imports which.

Each checker takes a parsed module and yields (what, complaint); a complaint that must stay is entered, with its reason,
under `what` in EXCEPTIONS.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from house import SOURCE, Findings, Function, Module, house, imports, last_word

FILE_LINES, FUNCTION_LINES, PARAMETERS = 500, 60, 8
FLOORS = {
    **dict.fromkeys(("platform.accelerator", "platform.ranges"), -1),  # torch's devices and profiler
    "traffic": -1,  # counts of memory and comm
    **dict.fromkeys(("errors", "text", "version", "memory"), 0),  # the ground, up to comm
    "platform": 0.3,  # memory and transports of one machine, real or rehearsed
    "comm": 0.6,
    "kernels": 0.9,  # C++ for every room above
    **dict.fromkeys(("units", "schedule", "checkpoint"), 1),  # the backbones; files and boxes
    **dict.fromkeys(("autograd", "replay", "planning"), 1.2),  # seams between techniques and torch, or the planner
    "quantized": 1.2,  # weights of other packages
    "parts": 1.3,  # protocols through which techniques reach the engine
    "rng": 1.5,  # numbers that any technique may draw
    "optim": 1.6,  # torch.optim over flats, on which updaters of other rooms stand
    **dict.fromkeys(("zero", "precision"), 2),  # the techniques, which never import each other
    **dict.fromkeys(("parameter_server", "offload", "recompute", "losses"), 2),
    "saved": 1.9,  # storage of saved tensors, below their recomputation
    "step.context": 1.4,  # of the step under way, for code inside of models
    "step": 2.1,  # one step, from the sum of gradients to the update
    "pipeline": 2.15,  # lists of actions of steps
    "tensor": 2.2,  # stands on losses
    "moe": 2.3,  # tokens of split layers are divided too
    "access": 2.5,  # parameters in the user's hands
    "plan": 3,
    "validation": 3.5,  # settings and models that are refused, with the way out
    "engine": 4,
    "data": 4.5,  # text and records as rows of tokens
    "interop": 4.5,
    "resilience": 4.5,
    "doctor": 4.7,
    "planner": 5,
    "verification": 5.2,
    "": 5.5,  # zeroshard itself, the public names; for the main job and the command line only
    "train": 6,
    "reproduce": 6.5,  # published numbers, computed again
    "supervisor": 6.7,
    "report": 6.8,
    "cli": 7,
    "__main__": 7.5,
}
MAY_READ_ENVIRONMENT = {"comm.mesh", "cli", "supervisor", "__main__"}
EXCEPTIONS: dict[str, str] = {
    "engine.engine": "The methods and readings that users call, each with its documentation, in one file.",
    "interop.inert_pickle": "DeepSpeed's checkpoints are pickles; torch.load(weights_only=True) reads inert ones.",
}


def long_files(module: Module) -> Findings:
    lines = len(module.text.splitlines())
    if lines > FILE_LINES:
        yield module.name, f"{lines} lines, at most {FILE_LINES}"


def long_functions(module: Module) -> Findings:
    for name, node, _ in module.definitions:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines = (node.end_lineno or first) - first + 1
        if isinstance(node, Function) and lines > FUNCTION_LINES:
            yield name, f"{lines} lines, at most {FUNCTION_LINES}"


def wide_signatures(module: Module) -> Findings:
    for name, node, above in module.definitions:
        if isinstance(node, Function):
            a = node.args
            arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
            count = len(arguments) - bool(above and isinstance(above[-1], ast.ClassDef) and not static)
            count += taken_apart(node) if a.vararg else 0
            if count > PARAMETERS:
                yield name, f"{count} parameters, at most {PARAMETERS}"


def taken_apart(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters more a function has by giving each of `*arguments` a name, or asking for one by its place."""
    assert node.args.vararg is not None
    name, most = node.args.vararg.arg, 1
    for child in ast.walk(node):
        value = getattr(child, "value", None)
        if isinstance(child, ast.arg) and child.arg == name and child.annotation is not None:
            annotation = child.annotation.value if isinstance(child.annotation, ast.Starred) else None
            elements = annotation.slice if isinstance(annotation, ast.Subscript) else None
            most = max(most, len(elements.elts) if isinstance(elements, ast.Tuple) else 1)
        elif not (isinstance(value, ast.Name) and value.id == name):
            continue
        elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Tuple):
            most = max(most, len(child.targets[0].elts))
        elif isinstance(child, ast.Subscript) and isinstance(child.slice, ast.Constant):
            most = max(most, 1 + int(child.slice.value))
    return most - 1


def missing_docstrings(module: Module) -> Findings:
    if module.text.strip() and ast.get_docstring(module.tree) is None:
        yield module.name or "zeroshard", "no docstring"
    for name, node, above in module.definitions:
        names = [n.name for n in (*above, node) if isinstance(n, (Function, ast.ClassDef))]
        private = any(n.startswith("_") for n in names) or any(isinstance(n, Function) for n in above)
        overload = any(isinstance(d, ast.Name) and d.id in ("overload", "override") for d in node.decorator_list)
        if not private and not overload and ast.get_docstring(node) is None:
            yield name, "no docstring"


def unsafe_loading(module: Module) -> Findings:
    for name in imports(module):
        if name.split(".")[0] in ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"):
            yield module.name, f"imports {name}"
        if name in ("torch.load", "torch.serialization.load"):
            yield module.name, f"imports {name}"
    for node in module.nodes:
        if last_word(node) == "load" and ast.unparse(node) in ("torch.load", "torch.serialization.load"):
            yield module.name, f"uses {ast.unparse(node)} in line {node.lineno}"


def hidden_inputs(module: Module) -> Findings:
    if {module.part, module.name} & MAY_READ_ENVIRONMENT:
        return
    for name in imports(module):
        if name in ("os.environ", "os.getenv", "os.environb"):
            yield module.name, f"imports {name}"
    for node in module.nodes:
        known = last_word(node) in ("environ", "getenv", "environb")
        if known and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb"):
            yield module.name, f"uses {ast.unparse(node)} in line {node.lineno}"


def room(dotted: str) -> str:
    """The part that a dotted name below zeroshard lies in: the longest that has a floor, or zeroshard itself."""
    words = dotted.split(".")
    return next((part for n in range(len(words), 0, -1) if (part := ".".join(words[:n])) in FLOORS), "")


def upward_imports(module: Module) -> Findings:
    if module.part not in FLOORS:
        yield module.name, "is on no floor"
        return
    own = room(module.name)
    for name in imports(module):
        package, _, rest = name.partition(".")
        target = room(rest)
        if package != "zeroshard" or target in (own, "errors") or not module.name:
            continue
        if FLOORS[target] >= FLOORS[own]:
            yield module.name, f"imports {name}, from floor {FLOORS[target]} to its own floor {FLOORS[own]}"


def named_devices(module: Module) -> Findings:
    """Uses of torch.cuda, of what is CUDA's alone in a tensor, and comparisons with the name of an accelerator."""
    if module.name == "platform.accelerator":
        return
    for name in imports(module):
        if f"{name}.".startswith("torch.cuda."):
            yield module.name, f"imports {name}"
    for node in module.nodes:
        name = last_word(node) if isinstance(node, ast.Attribute) else ""
        if name == "is_cuda" or (name == "cuda" and ast.unparse(node) == "torch.cuda"):
            yield module.name, f"uses {ast.unparse(node)} in line {node.lineno}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield module.name, f"calls {ast.unparse(node)} in line {node.lineno}"
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if any(isinstance(side, ast.Constant) and side.value == "cuda" for side in sides):
            yield module.name, f"asks {ast.unparse(node)} in line {node.lineno}"


RULES: list[Callable[[Module], Findings]] = [
    long_files,
    long_functions,
    wide_signatures,
    missing_docstrings,
    unsafe_loading,
    hidden_inputs,
    upward_imports,
    named_devices,
]


@cache
def findings(rule: Callable[[Module], Findings]) -> list[tuple[str, str]]:
    """What a rule finds in all modules."""
    return [finding for module in house() for finding in rule(module)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Callable[[Module], Findings]) -> None:
    assert len(house()) > 20
    found = [f"{what}: {complaint}" for what, complaint in findings(rule) if what not in EXCEPTIONS]
    assert not found, "\n" + "\n".join(found)


def test_exceptions_are_needed_and_have_a_reason() -> None:
    needed = {what for rule in RULES for what, _ in findings(rule)}
    assert set(EXCEPTIONS) <= needed
    assert all(reason.strip() for reason in EXCEPTIONS.values())


NO_MODULES = {"memory ulimit", "cli train"}  # a limit of the system, and a command


def unknown_modules(names: set[str], room: str, text: str) -> list[str]:
    """Names in the docstring of a room that are those of no module in it."""
    named = (f"{room} {name}" for name in re.findall(r"`([a-z_]+)`", text))
    return [each for each in named if each.replace(" ", ".") not in names and each not in NO_MODULES]


def test_rooms_name_modules_that_they_have() -> None:
    names = {module.name for module in house()}
    rooms = {".".join(path.parent.relative_to(SOURCE).parts) for path in SOURCE.rglob("__init__.py")} - {""}
    found = [
        each
        for module in house()
        if module.name in rooms
        for each in unknown_modules(names, module.name, ast.get_docstring(module.tree) or "")
    ]
    assert found == []
    assert unknown_modules({"moe.layer"}, "moe", "Read `layer`, then `router`.") == ["moe router"]


def test_every_floor_is_inhabited_and_every_part_has_a_floor() -> None:
    parts = {path.stem if path.is_file() else path.name for path in SOURCE.iterdir() if path.suffix in (".py", "")}
    assert parts - {"__pycache__", "__init__"} <= set(FLOORS)


def arrows() -> dict[str, set[str]]:
    """Which modules each module imports, anywhere in it, what type checkers alone look at included."""
    names = {module.name for module in house()}
    found: dict[str, set[str]] = {}
    for module in house():
        targets = {name.removeprefix("zeroshard.") for name in imports(module) if name.startswith("zeroshard.")}
        whole = {next((t[:end] for end in cut_points(t) if t[:end] in names), "") for t in targets}
        found[module.name] = whole - {module.name}
    return found


def cut_points(dotted: str) -> list[int]:
    """Where a dotted name may end, the longest first."""
    return [len(dotted), *(n for n in range(len(dotted) - 1, 0, -1) if dotted[n] == ".")]


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The modules that reach each other (Tarjan's strongly connected components of more than one)."""
    reach = {start: reached(graph, start) for start in graph}
    groups = {frozenset({a, *(b for b in reach[a] if a in reach.get(b, ()))}) for a in graph}
    return [set(group) for group in groups if len(group) > 1]


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Every module that imports lead to."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in graph.get(todo.pop(), ()):
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return seen


def test_no_circle_of_modules() -> None:
    graph = arrows()
    assert len(graph) > 200 and sum(map(len, graph.values())) > 800
    assert circles(graph) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [{"a", "b", "c"}]


TOP_MODULES = 8


def test_few_modules_stand_at_the_top() -> None:
    top = [path.name for path in SOURCE.iterdir() if path.suffix == ".py"]
    assert len(top) <= TOP_MODULES, top


VARIADIC = {  # functions of torch and Python that take any number of arguments, which mean the same
    *("add_row", "broadcast_tensors", "chain", "expand", "join", "max", "min", "new_empty", "new_full", "new_ones"),
    *("new_zeros", "pack", "permute", "print", "reshape", "save_for_backward", "sum", "view", "zip"),
}


def takes_any_number() -> set[str]:
    """Names of functions and classes that take any number of positional arguments, in every definition."""
    found: dict[str, bool] = {}
    for module in house():
        for _, node, above in module.definitions:
            if isinstance(node, Function):
                holder = above[-1] if above else None
                name = holder.name if isinstance(holder, ast.ClassDef) and node.name == "__init__" else node.name
                found[name] = found.get(name, True) and node.args.vararg is not None
    return VARIADIC | {name for name, every in found.items() if every}


def tuples_of(function: Function) -> Iterator[tuple[str, ast.Tuple]]:
    """The names that a function binds to a tuple which it writes out, with the tuple."""
    for node in ast.walk(function):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs = [(node.target, node.value)]
        for target, value in list(pairs):
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs += zip(target.elts, value.elts, strict=False)
        for target, value in pairs:
            branches = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
            yield from ((target.id, v) for v in branches if isinstance(target, ast.Name) and isinstance(v, ast.Tuple))


def unlike(written: ast.Tuple) -> bool:
    """Whether a tuple has several elements, and not just constants of one type."""
    types = {type(element.value) if isinstance(element, ast.Constant) else None for element in written.elts}
    return len(written.elts) > 1 and (len(types) > 1 or None in types)


def star_tuples(module: Module, variadic: set[str]) -> Findings:
    """Calls that take a tuple of unlike things apart into parameters, so that no reader sees which is which."""
    for name, function, _ in module.definitions:
        if not isinstance(function, Function):
            continue
        mixed = {bound for bound, written in tuples_of(function) if unlike(written)}
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        for call in calls:
            taken = [a.value.id for a in call.args if isinstance(a, ast.Starred) and isinstance(a.value, ast.Name)]
            if last_word(call.func) not in variadic:
                yield from ((name, f"*{each} in {ast.unparse(call)}") for each in taken if each in mixed)


def test_no_call_takes_a_mixed_tuple_apart() -> None:
    variadic = takes_any_number()
    found = {f"{name}: {what}" for module in house() for name, what in star_tuples(module, variadic)}
    assert not found, "\n" + "\n".join(sorted(found))


def test_star_tuples_are_found() -> None:
    text = (
        "def f(a, b):\n    touched = a.x, b.y\n    g(1, *touched)\n"
        "def f(a, b):\n    x, pair = 1, ((a, b) if a else (b, 0))\n    C.apply(*pair)\n"
        "def f(a, *rest):\n    sizes = (a, 2)\n    alike = [n for n in rest]\n"
        "    words = 'a', 'b'\n    number(*words)\n"
        "    a.view(*sizes)\n    g(*rest, *alike)\n    h(sizes)\n    many(*sizes)\n"
    )
    found = [what for _, what in star_tuples(Module.parse("plan", text), {"view", "many"})]
    assert found == ["*touched in g(1, *touched)", "*pair in C.apply(*pair)"]


SMALL = 60  # lines
ANSWERS = "what a technique answers to the planner, which its other files do not import"
SMALL_FILES = {  # short files that one other imports, with the reason
    "doctor.cpu_load": "processes started by name, without the imports of the search",
    "cli.plan_first": "printed before torch is imported",
    "planner.search.order": "the order of plans that fit, apart from the search for them",
    "precision.choice": ANSWERS,
    "recompute.choice": ANSWERS,
    "rng.choice": ANSWERS,
    "supervisor.scratch": "folders of killed supervisors, apart from the leader's decisions",
    "zero.residency": "the table of ZeRO's stages, which systems A5 to A7 point at",
}


def lonely(graph: dict[str, set[str]], lines: dict[str, int]) -> dict[str, str]:
    """Short modules that a single other one imports, and that one."""
    importers: dict[str, set[str]] = {}
    for module, targets in graph.items():
        for target in targets:
            importers.setdefault(target, set()).add(module)
    short = [name for name in lines if lines[name] < SMALL and len(importers.get(name, ())) == 1]
    return {name: next(iter(importers[name])) for name in short}


def test_small_files_with_one_importer_have_a_reason() -> None:
    packages = {".".join(path.parent.relative_to(SOURCE).parts) for path in SOURCE.rglob("__init__.py")}
    lines = {m.name: len(m.text.splitlines()) for m in house() if m.name not in packages}
    found = lonely(arrows(), lines)
    new = found.keys() - SMALL_FILES.keys()
    assert not new, f"merge each into its importer, or give it a reason: { {name: found[name] for name in new} }"
    assert all(SMALL_FILES.values())


def test_small_files_with_one_importer_are_found() -> None:
    graph = {"a": {"b", "c"}, "b": {"c", "d"}, "c": set(), "d": set()}
    assert lonely(graph, dict.fromkeys("abc", 59) | {"d": 60}) == {"b": "a"}


TERMS = {  # the field's terms, and the part of a path in which each is looked for
    "tied weights": "tied_weights",
    "loss scaling": "loss_scaling",
    "gradient accumulation": "gradient_accumulation",
    "the hang detector": "hang_detector",
    "shared memory": "shared_memory",
    "host Adam": "host/adam",
    "weight stashing": "weight_stashing",
    "checkpoint commit": "checkpoint/commit",
    "the planner's memory tracker": "planner/predict/memory_tracker",
    "the byte formulas of ZeRO": "zero/byte_formulas",
}


@pytest.mark.parametrize("term", TERMS)
def test_a_term_leads_to_one_file(term: str) -> None:
    paths = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")]
    assert len([path for path in paths if TERMS[term] in path]) == 1


def floors_table() -> str:
    """The rooms from the top floor down, each with the first sentence of its docstring; CONTRIBUTING.md has it."""
    rows = ["| Floor | Room | Content |", "|---|---|---|"]
    docs = {module.name: ast.get_docstring(module.tree) or "" for module in house()}
    for part, floor in sorted(FLOORS.items(), key=lambda item: (-item[1], item[0])):
        first = " ".join(docs[part].split("\n\n")[0].split()).replace("|", "/")
        rows.append(f"| {floor:g} | `{part or 'zeroshard'}` | {first} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_floors_is_that_of_this_test() -> None:
    """To make it anew: python -c "import sys; sys.path.insert(0, 'tests'); import test_house as h;
    print(h.floors_table())"."""
    assert floors_table() in (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()


ENGINE_LINES, ENGINE_CONDITIONS = 6500, 70  # of the engine with its satellites, `step` and `parts`
ATTRIBUTES, METHODS = 16, 12
TECHNIQUES = (  # words of techniques, and of the attributes that hold their objects
    r"offload|host\b|disk|stage|pipeline|version|stash|tied|stream|shared|zero|precision|rehears|expert|context_|below"
    r"|late\b|saver|gatherer|lower\b|splits|scaler|scales_loss|sliced|copied|loan|borrow|lend|shard_group|recompute"
)
RECORDS = {  # options of a command or a file, and what is written down: as many fields as there are facts
    *("plan.Plan", "cli.plan_options.PlanOptions", "cli.simulate.SimulateOptions", "train.config.TrainConfig"),
    *("doctor.facts.Facts", "doctor.profile.MachineProfile", "planner.predict.result.Prediction"),
    *("planner.predict.rehearse.Rehearsed", "report.run_records.Summary"),
}
LARGE = {  # classes above the limits
    "planning.questions.Choice": "every question of the planner to a technique",
    "engine.engine.Engine": "what users call",
    "interop.lightning.ZeroshardStrategy": "the methods that Lightning calls",
    "comm.collectives.Comm": "every collective, and the verdict on one that does not end",
}


def conditions(tree: ast.AST, inside: bool = False) -> Iterator[str]:
    """The texts of conditions that name a technique: of if, while, assert, match, comprehensions, and boolean words."""
    tests: list[ast.AST] = []
    if isinstance(tree, (ast.If, ast.IfExp, ast.While, ast.Assert)):
        tests = [tree.test]
    elif isinstance(tree, ast.comprehension):
        tests = list(tree.ifs)
    elif isinstance(tree, ast.match_case):
        tests = [tree.pattern, *([tree.guard] if tree.guard is not None else [])]
    elif isinstance(tree, ast.BoolOp) and not inside:
        tests = [tree]
    yield from (text for text in map(ast.unparse, tests) if re.search(TECHNIQUES, text, re.IGNORECASE))
    for child in ast.iter_child_nodes(tree):
        yield from conditions(child, inside or child in tests or isinstance(tree, ast.BoolOp))


def test_the_engine_is_small_and_seldom_asks_for_a_technique() -> None:
    engine = [module for module in house() if module.part in ("engine", "step")]
    lines = sum(len(module.text.splitlines()) for module in house() if module.part in ("engine", "step", "parts"))
    found = [f"{module.name}: {text}" for module in engine for text in conditions(module.tree)]
    assert lines <= ENGINE_LINES, lines
    assert len(found) <= ENGINE_CONDITIONS, "\n" + "\n".join(found)


OUTSIDE_CONDITIONS = 165  # 65 % of the 246 that there were before the engine was made of parts
ROOMS_OF_TECHNIQUES = {  # where a technique may ask for itself; lists of actions are the pipeline's own
    *(
        "zero",
        "precision",
        "pipeline",
        "offload",
        "saved",
        "recompute",
        "parameter_server",
        "schedule",
        "tensor",
        "moe",
    ),
}


def test_few_conditions_outside_of_techniques_rooms_name_one() -> None:
    found = [
        f"{module.name}: {text}"
        for module in house()
        if module.part not in {*ROOMS_OF_TECHNIQUES, "engine", "step"}
        for text in conditions(module.tree)
    ]
    assert len(found) <= OUTSIDE_CONDITIONS, "\n" + "\n".join(found)


def test_conditions_are_counted_once_each() -> None:
    text = "if plan.zero == 3 and x:\n    y = 1 if a else b\nz = [s for s in t if s.sliced]\nassert late or early\n"
    assert list(conditions(ast.parse(text))) == ["plan.zero == 3 and x", "s.sliced", "late or early"]


def size_of(node: ast.ClassDef) -> tuple[int, int]:
    """Attributes that a class has or sets, and its public methods; properties are neither."""
    attributes = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    methods = 0
    for function in (n for n in node.body if isinstance(n, ast.FunctionDef)):
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        methods += not function.name.startswith("_") and not any(d.split(".")[-1] in PROPERTIES for d in decorators)
        for n in ast.walk(function):
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self":
                attributes.add(n.attr)
    return len(attributes), methods


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for module in house():
        for name, node, _ in module.definitions:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert len(places) > 200
    assert {name: at for name, at in places.items() if len(at) > 1} == {}


PROPERTIES = ("property", "setter")


def test_classes_are_small() -> None:
    sizes = {name: size_of(node) for module in house() for name, node, _ in module.definitions
             if isinstance(node, ast.ClassDef)}  # fmt: skip
    large = {name for name, (attributes, methods) in sizes.items() if attributes > ATTRIBUTES or methods > METHODS}
    excepted = RECORDS | LARGE.keys()
    assert large <= excepted, large - excepted
    assert large >= excepted, f"{excepted - large} are small enough by now"
    assert all(sizes[name][1] <= METHODS for name in RECORDS)


BODY = '"""Doc."""\n'
BROKEN = {
    "long_files": ("plan", BODY + "x = 1\n" * 500, 1),
    "long_functions": ("plan", BODY + "@cache\ndef f():\n" + "    x = 1\n" * 59, 1),
    "wide_signatures": ("plan", "def f(a, b, /, c, d, *e, f, g, h, **i): ...\n"
                        "class A:\n    def f(self, a, b, c, d, e, f, g, h, i): ...\n"
                        "def g(a, b, c, d, e, f, *rest):\n    g, h, i = rest\n"
                        "def h(a, b, c, d, e, f, *rest):\n    return rest[0] + rest[2]\n"
                        "def i(a, b, c, d, e, f, *rest: *tuple[int, int, int]): ...", 5),
    "missing_docstrings": ("plan", "def f(): ...\nclass A:\n    def g(self): ...\n"
                           "    @property\n    def h(self): ...", 5),
    "unsafe_loading": ("plan", "import pickle\nfrom torch import load\nimport torch\n"
                       "torch.load(f)\nfrom dill import x", 4),
    "hidden_inputs": ("plan", "import os\nfrom os import environ\nos.environ['A']\nos.getenv('B')", 3),
    "upward_imports": ("units.flat", "from zeroshard import Plan\nfrom zeroshard.zero import x\n"
                       "import zeroshard.schedule\ndef f():\n    from zeroshard import plan\n"
                       "importlib.import_module('zeroshard.engine')\n__import__('zeroshard.engine.build')", 6),
    "named_devices": ("memory.transfers", "import torch.cuda\nfrom torch import cuda\nfrom torch.cuda import Event\n"
                      "__import__('torch.cuda.streams')\nstream: torch.cuda.Stream\ntorch.cuda.synchronize()\n"
                      "x.is_cuda\nx.cuda()\nif device.type == 'cuda': ...\ny = 'cuda' != kind", 10),
}  # fmt: skip
FINE = {
    "long_files": ("plan", BODY + "x = 1\n" * 499),
    "long_functions": ("plan", BODY + "def f():\n" + "    x = 1\n" * 59),
    "wide_signatures": ("plan", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...\n    a: int\n    b: int"),
    "missing_docstrings": ("plan", BODY + "def _f(): ...\nclass _A:\n    def g(self): ...\nclass A:\n    '''Doc.'''\n"
                           "    def __len__(self): ...\n    def f(self):\n        '''Doc.'''\n        def g(): ..."),
    "unsafe_loading": ("plan", "import torch, json\njson.load(f)\nsafetensors.torch.load(f)"),
    "hidden_inputs": ("comm.mesh", "import os\nos.environ['A']"),
    "upward_imports": ("comm.collectives", "from zeroshard.comm.mesh import Mesh\nimport torch\n"
                       "from zeroshard.errors import CommError"),
    "named_devices": ("memory.transfers", "import torch\nfrom torch.xpu import cudart\nkinds = {'cuda': 512}\n"
                      "torch.device('cuda')\nmodule.cuda\nif kind == 'cpu': ..."),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_finds_what_is_broken_and_nothing_else(rule: Callable[[Module], Findings]) -> None:
    name, text, count = BROKEN[rule.__name__]
    assert len(list(rule(Module.parse(name, text)))) == count
    assert list(rule(Module.parse(*FINE[rule.__name__]))) == []


@pytest.mark.parametrize(
    "part, text, fine",
    [
        ("zero", "from zeroshard.pipeline import x", False),
        ("precision", "from zeroshard.zero import x", False),
        ("memory.disk", "from zeroshard.units.flat import Flat", False),
        ("checkpoint", "from zeroshard.engine import x", False),
        ("checkpoint", "from zeroshard import Engine", False),
        ("train", "from zeroshard import Engine", True),
        ("cli", "from zeroshard.report import write_report", True),
        ("report", "import zeroshard.cli.main", False),
        ("engine", "from zeroshard import schedule as schedules", True),
        ("attic", "import json", False),
        ("memory.host", "from zeroshard.platform import accelerator", True),
        ("memory.host", "from zeroshard.platform.real import Platform", False),
        ("memory.transfers", "from zeroshard.comm.collectives import Comm", False),
        ("platform.real", "from zeroshard.memory import Disk", True),
        ("platform.real", "from zeroshard.comm.mesh import Mesh", False),
        ("comm.mesh", "from zeroshard.platform.real import Platform", True),
        ("platform.accelerator", "from zeroshard.platform.real import Platform", False),
        ("platform.accelerator", "from zeroshard.memory.ledger import Ledger", False),
        ("platform.accelerator", "from zeroshard.errors import PlanError", True),
        ("", "from zeroshard.engine import Engine", True),
    ],
)
def test_floors(part: str, text: str, fine: bool) -> None:
    assert (list(upward_imports(Module.parse(part, text))) == []) is fine
