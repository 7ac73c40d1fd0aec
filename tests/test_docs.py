"""What the documentation mentions exists: files, names, options, make targets; and its code compiles or runs."""

import ast
import dataclasses
import importlib
import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pool import Pool

import zeroshard as zs
from zeroshard.cli.compare import CompareOptions
from zeroshard.cli.completion import CompletionOptions
from zeroshard.cli.early_options import CHECKPOINT as CHECKPOINT_OPTIONS
from zeroshard.cli.early_options import DoctorOptions, ExportOptions, ProfileOptions, VerificationOptions
from zeroshard.cli.evaluate import EvaluateOptions
from zeroshard.cli.generate import GenerateOptions
from zeroshard.cli.launch import CLUSTERS
from zeroshard.cli.main import ReportOptions
from zeroshard.cli.partition import PartitionOptions
from zeroshard.cli.plan_options import PlanOptions
from zeroshard.cli.reproduce import ReproduceOptions
from zeroshard.cli.run import RunOptions
from zeroshard.cli.simulate import SimulateOptions, run_simulate
from zeroshard.pipeline.partition.cluster import Cluster
from zeroshard.train.config import TrainConfig
from zeroshard.train.options import parse
from zeroshard.train.toml_config import load_toml

ROOT = Path(__file__).parents[1]
PAGES = [
    *(page for page in (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")) if page.exists()),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]
FOLDERS = [ROOT, ROOT / "src" / "zeroshard", ROOT / "tests"]
THE_READERS_OWN = {"train.py", "mine.py"}  # files that a page asks its reader to write
COMMANDS: dict[str, Any] = {
    "train": TrainConfig,
    "plan": PlanOptions,
    "doctor": DoctorOptions,
    "reproduce": ReproduceOptions,
    "report": ReportOptions,
    "compare": CompareOptions,
    "simulate": SimulateOptions,
    "profile": ProfileOptions,
    "partition": PartitionOptions,
    "run": RunOptions,
    "verify": VerificationOptions,
    "export": ExportOptions,
    "generate": GenerateOptions,
    "evaluate": EvaluateOptions,
    "completion": CompletionOptions,
    **{f"launch {name}": options for name, options in CLUSTERS.items()},
    **{f"checkpoint {name}": options for name, options in CHECKPOINT_OPTIONS.items()},
}
FENCE = re.compile(r"^(?P<marks>`{3,})(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=marks)$", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Code of the fenced blocks of a page in one of the languages."""
    for fence in FENCE.finditer(page.read_text()):
        if fence["language"].strip() in languages:
            yield fence["code"]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def quoted(page: Path) -> list[str]:
    """What stands in backticks outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def command_lines(page: Path) -> list[list[str]]:
    """The words of every shell command on a page, in blocks and in backticks."""
    code = list(blocks(page, "sh", "bash", "console", "shell", ""))
    code += re.findall(r"(?:^ {4}\S.*\n)+", prose(page), re.MULTILINE)  # indented blocks
    lines = [line.strip().removeprefix("$ ") for block in code for line in block.replace("\\\n", " ").splitlines()]
    calls = (line for line in (*lines, *quoted(page)) if re.search(r"\b(zeroshard|make)\b", line))
    return [words for words in (shlex.split(line, comments=True) for line in calls) if words]


def zeroshard_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(command, its words) of every call of zeroshard on a page; `make train ARGS=...` is one."""
    for words in command_lines(page):
        if words[:2] == ["make", "train"]:
            given = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
            yield "train", [word for text in given for word in shlex.split(text)]
        first = words[0] == "zeroshard" or "=" in words[0] or words[0] in ("torchrun", "python")
        if first and "zeroshard" in words[:-1]:
            place = words.index("zeroshard") + 1
            if not words[place].isupper():  # COMMAND stands for any
                yield words[place], words[place + 1 :]


def check_options(command: str, words: list[str], page: Path) -> None:
    """Raise unless `zeroshard COMMAND WORDS` would be understood."""
    if "--" in words:  # what follows is a command for another
        words, behind = words[: words.index("--")], words[words.index("--") + 1 :]
        if behind[:1] == ["train"]:
            check_options("train", behind[1:], page)
    if command in ("launch", "checkpoint") and words and f"{command} {words[0]}" in COMMANDS:
        command, words = f"{command} {words[0]}", words[1:]
    known = {*COMMANDS, "launch", "checkpoint", "--help", "--help-all", "-h", "--version"}
    assert command in known, f"{page.name}: there is no command {command}"
    words = words[: words.index(">")] if ">" in words else words  # the file that gets the output
    words = [word for word in words if word not in ("--help", "--help-all", "...")]
    for option in ("--config",):
        if option in words:
            assert len(words) > words.index(option) + 1, f"{page.name}: {option} has no value"
            del words[words.index(option) : words.index(option) + 2]
    if command in COMMANDS and (words or command == "train"):
        try:
            parse(COMMANDS[command], words, f"zeroshard {command}")
        except SystemExit as error:
            pytest.fail(f"{page.name}: zeroshard {command} {shlex.join(words)} is refused ({error.code})")


def exists(name: str, page: Path) -> bool:
    """Whether a path on a page is a file or folder here, seen from the page, the root, the package or the tests."""
    return any((folder / name).exists() for folder in (page.parent, *FOLDERS))


def lookup(dotted: str) -> object:
    """The object that a dotted name below zeroshard means. Raises if there is none."""
    first, *rest = dotted.split(".")
    found: object = importlib.import_module(first)
    for word in rest:
        if not hasattr(found, word) and not dataclasses.is_dataclass(found):
            importlib.import_module(f"{found.__name__}.{word}")  # type: ignore[attr-defined]
        fields = get_type_hints(found) if dataclasses.is_dataclass(found) else {}
        found = fields[word] if word in fields else getattr(found, word)
    return found


def zeroshard_names(tree: ast.AST) -> Iterator[str]:
    """The dotted names below zeroshard that a Python block imports or uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "zeroshard":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "zeroshard")
        if isinstance(node, ast.Attribute) and re.fullmatch(r"zs(\.\w+)+", ast.unparse(node)):
            yield ast.unparse(node).replace("zs", "zeroshard", 1)


def test_there_are_pages() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {"CONTRIBUTING.md", "SECURITY.md", "docs/index.md", "docs/quickstart.md", "docs/limits.md"} <= names


@each_page
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for target in targets:
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name} links to {target}"
            if anchor and linked.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in slugs, f"{page.name} links to {target}, and {linked.name} has no such heading"


@each_page
def test_named_files_exist(page: Path) -> None:
    tops = {path.name for path in ROOT.iterdir()}
    for name in quoted(page):
        if re.fullmatch(r"[\w./\-]+", name) and name not in THE_READERS_OWN:
            ours = "/" in name and name.partition("/")[0] in tops - {"runs"}
            if ours or name.endswith((".py", ".md")) or name in ("Makefile", "pyproject.toml", "constraints.txt"):
                assert exists(name, page), f"{page.name} names {name}, which does not exist"


@each_page
def test_commands_are_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, words in zeroshard_commands(page):
        check_options(command, words, page)


@each_page
def test_options_in_prose_exist(page: Path) -> None:
    kinds = (*COMMANDS.values(), zs.Plan)
    options = {field.name.replace("_", "-") for kind in kinds for field in dataclasses.fields(kind)}
    known = {f"--{name}" for name in options} | {"--config", "--help", "--help-all", "--version", "--plan"}
    for name in quoted(page):
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", name):
            ours = not re.match(r"(torchrun|pip|pytest|git|python)\b", name)
            assert not ours or option in known or option.replace("--no-", "--") in known, f"{page.name} names {option}"


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w.-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in command_lines(page):
        if words[0] == "make":
            wanted = {word for word in words[1:] if "=" not in word}
            assert wanted <= targets, f"{page.name} wants make {wanted - targets}"


@each_page
def test_names_of_the_package_exist(page: Path) -> None:
    for text in quoted(page):
        for name in re.findall(r"\b(?:zs|zeroshard)(?:\.[A-Za-z_]\w*)+", text):
            if not re.search(rf"[/\w]{re.escape(name)}|{re.escape(name)}\.?(py|md)\b", text):
                lookup(re.sub(r"^zs\b", "zeroshard", name))
        for name in re.findall(r"\bengine\.([a-z_]+)\b", text):
            instance = {"steps", "skipped", "schedule", "model", "plan", "mesh", "ledger", "comm", "py"}
            assert hasattr(zs.Engine, name) or name in instance, f"{page.name} names engine.{name}"
    for code in blocks(page, "python"):
        for name in zeroshard_names(ast.parse(code)):
            lookup(name)


@each_page
def test_plans_in_prose_are_accepted(page: Path) -> None:
    for text in quoted(page):
        if re.fullmatch(r"zs\.Plan\((?:\w+=.*)?\)", text) and "..." not in text:
            assert isinstance(eval(text, {"zs": zs}), zs.Plan), f"{page.name} has {text}"


@each_page
def test_option_files_load(page: Path, tmp_path: Path) -> None:
    for code in blocks(page, "toml"):
        file = tmp_path / "options.toml"
        file.write_text(code)
        load_toml(file, TrainConfig)


def test_the_cluster_file_loads(tmp_path: Path) -> None:
    (code,) = blocks(ROOT / "docs" / "cli.md", "ini")
    (tmp_path / "cluster.toml").write_text(code)
    assert Cluster.load(tmp_path / "cluster.toml").devices == 8


@each_page
def test_lines_are_short_and_name_nobodys_machine(page: Path) -> None:
    for number, line in enumerate(page.read_text().splitlines(), 1):
        where = f"{page.name}:{number}"
        assert len(line) <= 140 or line.startswith("|") or page.name == "README.md", (
            f"{where} has {len(line)} characters"
        )
        assert not re.search(r"(?<![\w.])/(home|work|root|tmp|Users|opt)/", line), (
            f"{where} names a path of one machine"
        )


def test_code_fits_a_window_of_1280_pixels() -> None:
    """There is room for 116 characters beside the list of pages."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if "_build" not in page.parts:
            for code in (fence["code"] for fence in FENCE.finditer(page.read_text())):
                wide = [line for line in code.splitlines() if len(line) > 114]
                assert not wide, f"{page.name} has {wide}"


def entries(page: Path) -> list[Path]:
    """The pages that the tables of contents of a page name."""
    lines = [line for code in blocks(page, "{toctree}") for line in code.splitlines()]
    names = [line for line in lines if line and not line.startswith(":")]
    return [page.parent / f"{name}.md" for name in names]


def test_every_page_is_under_one_of_few_headings() -> None:
    top = entries(ROOT / "docs" / "index.md")
    assert len(top) <= 12
    found = [page for first in top for page in (first, *entries(first))]
    front = ROOT / "docs" / "index.md"
    assert sorted(found) == [page for page in PAGES if front.parent in page.parents and page != front]


def test_no_object_is_described_twice() -> None:
    """Sphinx, which `make docs` has stop at a warning, warns of the second description."""
    described = [name for page in PAGES for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", page.read_text(), re.M)]
    assert described and len(described) == len(set(described))


@pytest.mark.parametrize(
    "command", ["train", "simulate", "profile", "partition", "export", "run", "verify", "generate", "evaluate"]
)
def test_every_option_has_its_row(command: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    section = page.partition(f"\n## zeroshard {command}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `--([a-z0-9-]+)`", section, re.MULTILINE)
    kinds = (TrainConfig, zs.Plan) if command == "train" else (COMMANDS[command],)
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)} - {"plan", "path"}
    options = {{"planning": "plan"}.get(name, name) for name in fields}
    assert sorted(rows) == sorted(name.replace("_", "-") for name in options)


def test_every_error_has_its_row() -> None:
    errors = importlib.import_module("zeroshard.errors")
    page = (ROOT / "docs" / "errors.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, zs.ZeroshardError)]
    for kind in kinds:
        assert f"`{kind.__name__}`" in page or kind is zs.ZeroshardError
        if kind is not zs.ZeroshardError:
            assert f"| `{kind.__name__}` (" in page


PICTURES = ROOT / "docs" / "pictures"
BY_HAND = {"ledger", "mesh", "schedule", "units"}
DRAWN = {  # by the program: see `make pictures`
    "all": ("--all",),
    "interleaved": ("--schedule", "interleaved", "--virtual-stages", "2"),
    **{name: ("--schedule", name) for name in ("naive", "gpipe", "1f1b", "zb-h1")},
    **{name: ("--schedule", name, "--steps", "3") for name in ("pipedream", "2bw")},
}
FOUR_BY_EIGHT = ("--stages", "4", "--microbatches", "8")


def test_pictures_stand_alone() -> None:
    pictures = {picture.stem: picture.read_text() for picture in PICTURES.glob("*.svg")}
    drawn = {*(f"timeline-{name}" for name in DRAWN), "timeline-measured", "memory-by-stage"}
    assert set(pictures) == BY_HAND | drawn
    for name, text in pictures.items():
        assert not re.search(r"href|url\((?!#)|<script|<image|@import", text), f"{name} loads something"
        assert "<title" in text
        assert "<desc" in text or name not in BY_HAND


BY_STAGE = runpy.run_path(str(ROOT / "docs" / "memory_by_stage.py"))


def counted(mesh: zs.Mesh) -> list[Any]:
    """Bytes of this rank at each stage, as the picture has them."""
    return [BY_STAGE["measured"](mesh, stage) for stage in range(4)]


def test_the_picture_of_memory_is_what_ranks_count_and_the_paper_says(pool: Pool) -> None:
    counts = pool.run(counted, 4)
    assert counts == [[BY_STAGE["formula"](stage, BY_STAGE["parameters"](), 4) for stage in range(4)]] * 4
    assert (PICTURES / "memory-by-stage.svg").read_text() == BY_STAGE["draw"](counts[0], 4), (
        "draw it with make pictures"
    )


def test_the_readme_is_short_and_its_loop_is_one_that_is_run() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    assert list(blocks(ROOT / "README.md", "diff")) == list(blocks(ROOT / "docs" / "coming_from.md", "diff"))[:1]


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_are_what_the_program_draws(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_simulate([*FOUR_BY_EIGHT, *DRAWN[name], "--svg", str(tmp_path / "drawn.svg")])
    kept = (PICTURES / f"timeline-{name}.svg").read_text()
    assert (tmp_path / "drawn.svg").read_text() == kept, "draw it again with make pictures"


def test_the_figures_of_all_schedules_are_the_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_simulate([*FOUR_BY_EIGHT, "--all", "--virtual-stages", "2", "--json", "--out", str(tmp_path)])
    schedules = json.loads(capsys.readouterr().out)["schedules"]
    page = (ROOT / "docs" / "schedules.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| `[\w-]+`.* ms ", line)]
    assert rows == [schedule_row(facts) for facts in schedules]


def test_the_table_of_what_combines_is_what_plans_say() -> None:
    found = runpy.run_path(str(ROOT / "docs" / "combines.py"))["page"]()
    assert (ROOT / "docs" / "combines.md").read_text() == found, "print it again: python docs/combines.py"
    rows = dict(re.findall(r"^\| ([\w-]+) \| (.*) \|$", found.partition("| Word |")[0], re.MULTILINE))
    assert rows["late"].endswith("1 2 3") and "-" in rows["shared"].split(" | ")


def test_the_page_of_settings_is_what_the_classes_say() -> None:
    found = runpy.run_path(str(ROOT / "docs" / "settings.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == found, "print it again: python docs/settings.py"


def schedule_row(facts: dict[str, Any]) -> str:
    """The row of `docs/schedules.md` for what `zeroshard simulate --json` says of a schedule."""
    steady = facts.get("steady_bubble_fraction")
    extra = f", v = {facts['virtual_stages']}" if facts["virtual_stages"] > 1 else ""
    cells = [
        f"`{facts['schedule']}`" + (extra if steady is None else f", {facts['steps']} steps"),
        f"{round(facts['step_seconds'] * 1e3, 6):g} ms",
        percent(facts["bubble_fraction"]) + ("" if steady is None else f", steady {percent(steady)}"),
        percent(facts["bubble_over_ideal"]),
        ", ".join(f"{n:g}" for n in facts["peak_in_flight"]),
        ", ".join(map(str, facts["weight_versions"])),
    ]
    return f"| {' | '.join(cells)} |"


def percent(share: float) -> str:
    """A share to a tenth of a percent."""
    return f"{round(abs(share) * 100, 6):.1f} %"


MISSING = re.compile(r"\b(?:not here yet|without an equivalent|not (?:been )?(?:tested|built|written) yet|untested)\b")
HERE = re.compile(r"tensor parallel|pipeline|experts|recomput|offload|ZeRO|\bthe GPU path\b|\bone GPU\b", re.IGNORECASE)


@each_page
def test_nothing_that_is_here_is_said_to_be_missing(page: Path) -> None:
    """Sentences that name what is missing, and the list of it on the front page, name none of the settings."""
    text = " ".join(prose(page).split())
    for sentence in re.split(r"(?<=[.:;]) ", text):
        assert not (MISSING.search(sentence) and HERE.search(sentence)), f"{page.name}: {sentence}"


@each_page
def test_measured_figures_name_their_revision_and_date(page: Path) -> None:
    """Where a page quotes a file of results; the date is in its name, or beside the revision."""
    if page.name in ("CONTRIBUTING.md", "SECURITY.md"):
        return
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", prose(page)):
        for name in re.findall(r"benchmarks/results/[\w.-]+\w", paragraph):
            where = f"{page.name} quotes {name}"
            assert re.search(r"`[0-9a-f]{7}`", paragraph), f"{where} without the revision that gave it"
            assert re.search(r"\d{4}-\d{2}-\d{2}", paragraph), f"{where} without a date"


RESULTS = ROOT / "benchmarks" / "results"


def test_every_file_of_results_has_its_command_revision_and_date() -> None:
    rows = re.findall(
        r"^\| `([\w.-]+)` \| (.+) \| `[0-9a-f]{7}` \| ([\d-]+) \|$", (RESULTS / "README.md").read_text(), re.M
    )
    files = {path.stem for path in RESULTS.iterdir() if path.name != "README.md"}
    assert sorted(stem for stem, _, _ in rows) == sorted(files)
    for stem, command, date in rows:
        scripts = re.findall(r"benchmarks/[\w/]+\.py", command)
        assert stem.endswith(date) and all((ROOT / script).exists() for script in scripts)


def test_the_revisions_that_gave_figures_are_in_the_history() -> None:
    known = subprocess.run(["git", "-C", str(ROOT), "log", "--format=%h"], capture_output=True, text=True, check=True)
    short = {revision[:7] for revision in known.stdout.split()}
    if len(short) < 100:
        pytest.skip("a shallow clone")
    for page in (*PAGES, RESULTS / "README.md"):
        named = set(re.findall(r"`([0-9a-f]{7})`", prose(page)))
        assert named <= short, f"{page.name} names {named - short}"
