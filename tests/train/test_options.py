"""Options of a command: groups, short forms, other names, files of the same names, and what the help shows."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest

from zeroshard.cli.plan_options import PlanOptions
from zeroshard.errors import ConfigError
from zeroshard.plan import GROUPS, RENAMED, Plan
from zeroshard.train.config import TrainConfig
from zeroshard.train.option_tree import Named, Positional
from zeroshard.train.option_values import default_text, described_values, kind_of
from zeroshard.train.options import parse
from zeroshard.train.toml_config import dump_toml, load_toml

BOXES = [
    *(
        "model and text",
        "training",
        "mixtures of experts",
        "validation and generated text",
        "run folder and checkpoints",
        "bad steps",
    ),
    *("checks and records", "ranks and device", "choice of the plan"),
    *("plan", "loss-scale", "pipeline-parallel", "tensor-parallel", "expert-parallel", "activations", "offload"),
]


def train(*words: str) -> TrainConfig:
    return parse(TrainConfig, words, "zeroshard train")


def refused(capsys: pytest.CaptureFixture[str], *words: str, cls: Any = TrainConfig) -> str:
    """The error of words that cannot be read, which exits with 2 and leaves stdout alone."""
    with pytest.raises(SystemExit) as stop:
        parse(cls, words, "job")
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == ""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", said.err).split())


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The help that words ask for, at a width."""

    def asked(*words: str, cls: Any = TrainConfig, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stop:
            parse(cls, words, "zeroshard train")
        said = capsys.readouterr()
        assert stop.value.code == 0 and said.err == ""
        return said.out

    return asked


def flags(text: str) -> list[str]:
    """The lines of a help page that begin an option."""
    return [line.strip("│ ") for line in text.splitlines() if re.match(r"│ (--|[A-Z]+ )", line)]


def texts(text: str) -> str:
    """A help page as running words."""
    return " ".join(text.replace("│", " ").split())


def test_a_group_is_its_first_setting_and_others_by_their_names() -> None:
    words = ["--pipeline-parallel", "4", "--pipeline-parallel.schedule", "gpipe", "--microbatches", "4"]
    assert train(*words).plan == train("--pp", *words[1:]).plan
    plan = train(*words).plan
    assert (plan.pipeline.stages, plan.pipeline.schedule, plan.clip_norm) == (4, "gpipe", 1.0)
    assert train("--pp", "2").plan.pipeline_parallel == 2
    assert train("--pipeline-parallel.no-vertical-sync").plan == TrainConfig().plan
    offload = train("--offload", "optimizer", "--offload.moments", "bf16", "--no-checkpoint").plan.offloading
    assert (offload.kinds, offload.moments, offload.fraction) == ({"optimizer"}, "bf16", 1.0)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (("--ranks", "2"), ("--nproc-per-node", "2")),
        (("--out", "elsewhere"), ("--output-dir", "elsewhere")),
        (("--microbatches", "2"), ("--gradient-accumulation-steps", "2")),
        (("--clip-norm", "0.5"), ("--max-grad-norm", "0.5")),
        (("--pipeline-parallel", "2"), ("--pp", "2")),
        (("--batch-per-rank", "8"), ("--batch_per_rank=8",)),
        (("--clip-norm", "None"), ("--max-grad-norm", "None")),
    ],
)
def test_other_names_of_options(ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    assert train(*ours) == train(*theirs) != TrainConfig()


def test_a_file_has_the_names_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("batch_per_rank = 8\nmicrobatches = 4\n[pipeline_parallel]\nstages = 4\nschedule = 'gpipe'\n")
    words = ["--batch-per-rank", "8", "--microbatches", "4", "--pp", "4", "--pipeline-parallel.schedule", "gpipe"]
    assert train("--config", str(path)) == train(*words)
    changed = train("--config", str(path), "--pipeline-parallel.schedule", "1f1b")
    assert (changed.batch_per_rank, changed.plan.pipeline.stages, changed.plan.pipeline.schedule) == (8, 4, "1f1b")


def test_the_tokenizer_is_that_of_the_model_by_default(tmp_path: Path) -> None:
    assert TrainConfig().tokenizer == TrainConfig(model=str(tmp_path)).tokenizer == "bytes"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has tokenizer.model and no tokenizer.json. Write one with"):
        TrainConfig(model=str(tmp_path))
    assert TrainConfig(model=str(tmp_path), tokenizer="bytes").tokenizer == "bytes"
    (tmp_path / "tokenizer.json").write_text("{}")
    for model in (tmp_path, tmp_path / "config.json"):
        assert TrainConfig(model=str(model)).tokenizer == str(tmp_path)


def test_a_run_folder_of_an_earlier_version_loads(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('model = "tiny"\nbatch = 8\n[plan]\nstages = 2\nmicrobatches = 4\n')
    stored = load_toml(path, TrainConfig)
    assert (stored.batch_per_rank, stored.plan.pipeline.stages) == (8, 2)
    dump_toml(stored, path)
    assert "\nbatch_per_rank = 8\n" in path.read_text() and load_toml(path, TrainConfig) == stored
    path.write_text("batch = 8\n")
    with pytest.raises(ConfigError, match="unknown option batch; use batch_per_rank, the rows of one rank and step"):
        load_toml(path, TrainConfig)
    path.write_text("batch = 8\nbatch_per_rank = 4\n[plan]\nzero = 1\n")
    with pytest.raises(ConfigError, match="unknown option batch;"):
        load_toml(path, TrainConfig)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--steps", "many"), "--steps INT Steps of the whole run. (default: 800)"),
        (("--ranks", "many"), "--ranks, --nproc-per-node INT Processes to start"),
        (("--zero", "4"), "--zero: '4' is not one of 0, 1, 2, 3."),
        (("--pipeline-parallel", "two"), "--pipeline-parallel, --pp INT"),
        (("--pipeline-parallel.shedule", "gpipe"), "did you mean --pipeline-parallel.schedule?"),
        (("--pp", "0"), "--pp is 0"),
        (("--batch-per-rank", "0"), "--batch-per-rank is 0; it must be 1 or more."),
        (("--batch-per-rank", "3", "--microbatches", "2"), "make --batch-per-rank a multiple of 2."),
        (("--global-batch", "8"), "no option --global-batch here; use --batch-per-rank, the rows of one rank"),
        (("--global_batch=8",), "no option --global_batch here; use --batch-per-rank"),
        (
            ("--batch", "8"),
            "no option --batch here; use --batch-per-rank, the rows of one rank and step, all microbatches together.",
        ),
        (("--bf16",), "no option --bf16 here; use --precision, bf16 or fp16."),
        (("--per-device-train-batch-size", "4"), "use --batch-per-rank, the rows of one rank"),
        (("--stages", "4"), "no option --stages here; use --pipeline-parallel 4."),
        (("--chunks=2",), "no option --chunks here; use --pipeline-parallel.virtual-stages 2."),
        (("--shard-ranks", "2"), "no option --shard-ranks here; use --shard-group 2."),
        (("--loss-scale-window", "9", "--zero", "1"), "use --loss-scale.window 9."),
        (("--delayed_update", "--trace"), "no option --delayed_update here; use --offload.delayed-update."),
    ],
)
def test_wrong_options_exit_with_2(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *words)


def test_each_setting_of_an_earlier_name_has_a_hint() -> None:
    options = all_fields()
    for name, setting in RENAMED.items():
        instead, meaning = TrainConfig.ELSEWHERE[name]
        shown = f"{instead}.{next(iter(GROUPS[instead].__dataclass_fields__))}" if instead in GROUPS else instead
        assert (shown, meaning) == (setting, "") and shown in options and name not in options


def test_an_earlier_name_in_a_file_has_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("chunks = 2\n")
    with pytest.raises(ConfigError, match=r"unknown option chunks; use pipeline_parallel\.virtual_stages$"):
        load_toml(path, TrainConfig)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "many"), "--ranks: 'many' is not a whole number or None. "),
        (("--steps", "1e3"), "--steps: '1e3' is not a whole number. "),
        (("--clip-norm", "big"), "--clip-norm: 'big' is not a number or None. "),
        (("--loss-scale", "high"), "--loss-scale: 'high' is not a number or one of auto, dynamic, off. "),
        (("--pp", "two"), "--pipeline-parallel: 'two' is not a whole number. "),
        (("--pipeline-parallel.replicas", "2", "x"), "replicas: '2 x' is not a list of whole numbers or None. "),
        (("--reduce-dtype", "int8"), "'int8' is not one of fp32, bf16, fp16 or None."),
    ],
)
def test_a_wrong_value_is_told_the_right_ones(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, *words)
    assert said in text and "NoneType" not in text and "{None}" not in text


@pytest.mark.parametrize("name", ["--batch-per-rank", "--batch", "--rows"])
def test_the_planner_names_its_own_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"There is no option {name} here; use --global-batch" in refused(capsys, name, "8", cls=PlanOptions)


def test_the_short_help_shows_a_first_run(page: Any) -> None:
    short = page("--help")
    assert short == page("-h") == page("--steps", "5", "--help")
    shown = flags(short)
    assert len(shown) == len(TrainConfig.FIRST) and {"--batch-per-rank INT", "--ranks, --nproc-per-node INT"} < {*shown}
    assert "--plan {given,auto}" in shown and "--pipeline-parallel, --pp INT" in shown
    assert not any("--weight-decay" in line or "--offload." in line for line in shown)
    assert [line for line in short.splitlines() if line.startswith("╭")] == ["╭─ options " + "─" * 68 + "╮"]
    last = short.splitlines()[-1]
    assert last == f"These are the options of a first run; zeroshard train --help-all shows all {len(all_fields())}."


def all_fields() -> list[str]:
    """Every option of the main job, groups spelled out."""
    plan = {field.name for field in fields(Plan)} - {*GROUPS}
    settings = [f"{name}.{field.name}" for name, group in GROUPS.items() for field in fields(group)]
    return [*(field.name for field in fields(TrainConfig) if field.name != "plan"), *plan, *settings]


def test_the_whole_help_has_a_box_for_each_group(page: Any) -> None:
    whole = page("--help-all")
    assert re.findall(r"^╭─ (.*?) ─+╮$", whole, re.MULTILINE) == BOXES
    assert len(flags(whole)) == len(all_fields())
    assert {"--weight-decay FLOAT", "--offload.disk STR", "--pipeline-parallel.replicas INT ..."} < {*flags(whole)}
    box = whole.partition("╭─ bad steps ")[2].partition("╰")[0]
    assert flags(box) == ["--rollbacks INT", "--spike FLOAT", "--patience INT"]
    assert "first run" not in whole


@pytest.mark.parametrize("words", ["--help", "--help-all"])
@pytest.mark.parametrize("columns", [80, 120, 200])
def test_the_help_fits_and_names_no_none(words: str, columns: int, page: Any) -> None:
    text = page(words, columns=columns)
    assert "None" not in text and "[" not in text.partition("╭")[2] and "(default: )" not in text
    lines = text.splitlines()
    assert max(map(len, lines)) == min(columns, 120) and all(line == line.rstrip() for line in lines)
    assert "Rows per rank and step, all microbatches together. (default: 4)" in texts(text)


def test_the_help_takes_defaults_from_a_file(tmp_path: Path, page: Any) -> None:
    path = tmp_path / "job.toml"
    path.write_text("batch_per_rank = 16\noffload = 'optimizer'\nclip_norm = 'None'\n")
    text = texts(page("--config", str(path), "--help"))
    assert "together. (default: 16)" in text and "alone. (default: optimizer)" in text
    assert "which keeps the whole within it. --" in text


@dataclass(frozen=True)
class Base:
    """Copy a file.

    Nothing is moved.
    """

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {"times": ("-t",)}
    source: Positional[Path]
    """What to
    copy."""
    times: int = 1
    """How often."""
    untold: Literal["a", "b", None] = None


@dataclass(frozen=True, kw_only=True)
class Copying(Base):
    """Copy a file elsewhere."""

    target: Annotated[Path, Named("to")]
    """Where."""
    times: int = 2
    words: tuple[str, ...] = ("a b", "c")
    """Words."""


def test_a_command_without_a_first_run_shows_all(page: Any) -> None:
    text = page("--help", cls=Base)
    assert text == page("--help-all", cls=Base)
    assert text.startswith(
        "usage: zeroshard train [OPTIONS] SOURCE\n\nCopy a file.\n\nNothing is moved.\n\n--config FILE"
    )
    assert flags(text) == ["SOURCE", "--times, -t INT", "--untold {a,b}"]
    assert "What to copy. (required)" in texts(text) and text.endswith("╯\n")


def test_texts_and_defaults_are_inherited(page: Any) -> None:
    text = texts(page("--help", cls=Copying))
    assert "--times, -t INT How often. (default: 2)" in text and "--to PATH Where. (required)" in text
    assert "--words NAME ... Words. (default: 'a b' c)" in text
    assert parse(Copying, ["x", "--to", "y", "-t", "3"], "copy") == Copying(Path("x"), times=3, target=Path("y"))


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | None, "a whole number or None"),
        (Literal["auto", "never"] | Path, "one of auto, never or a path"),
        (tuple[float, ...], "a list of numbers"),
        (tuple[int, Path] | None, "a list of 2: a whole number and a path or None"),
        (str, "a string"),
    ],
)
def test_the_values_of_a_type_in_a_sentence(hint: Any, words: str) -> None:
    assert described_values(hint) == words


@pytest.mark.parametrize(
    ("hint", "kind"),
    [
        (int | None, "INT"),
        (Path | None, "PATH"),
        (Literal["fp32", "bf16"] | None, "{fp32,bf16}"),
        (Literal["auto", "never"] | Path, "{auto,never}|PATH"),
        (tuple[str, ...], "NAME ..."),
        (tuple[int, ...] | None, "INT ..."),
        (tuple[int, Path] | None, "INT PATH"),
        (float, "FLOAT"),
    ],
)
def test_the_kind_of_a_value(hint: Any, kind: str) -> None:
    assert kind_of(hint) == kind


def test_defaults_are_as_they_would_be_typed() -> None:
    assert [default_text(value) for value in (None, (), "", 0, False)] == ["", "", "", "0", "False"]
    assert [default_text(value) for value in ("def ", (1, 2), Path("a b"))] == ["'def '", "1 2", "'a b'"]
