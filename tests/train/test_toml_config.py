"""One dataclass behind the command line and a TOML file."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeroshard.errors import ConfigError
from zeroshard.train.options import parse
from zeroshard.train.toml_config import dump_toml, load_toml


@dataclass(frozen=True)
class Engine:
    """How the engine shards."""

    stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage."""
    offload: bool = False
    """Keep states in host memory."""
    budget: str | None = None
    """Device memory to stay within."""


@dataclass(frozen=True)
class Job:
    """Train a model."""

    data: tuple[Path, ...] = ()
    """Files to read."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward pass."""
    learning_rate: float = 0.001
    """Peak rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of both moments."""
    steps: int = 100
    """Steps to train."""
    shuffle: bool = True
    """Shuffle the windows."""
    folder: Path | None = None
    """Where results go."""
    resume: str | None = "latest"
    """Checkpoint to resume from."""
    tags: tuple[str, ...] = ("first",)
    """Words for the report."""
    engine: Engine = field(default_factory=lambda: Engine(stage=2))
    """The engine."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"steps is {self.steps} and must not be negative; give 0 or more")


@dataclass(frozen=True)
class Needy:
    """An option without a default."""

    name: str


def load(tmp_path: Path, text: str, cls: Any = Job) -> Any:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return load_toml(path, cls)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])).filter(lambda text: text != "None")
FINITE = st.floats(allow_nan=False)
PATHS = st.text("abc/.- ", min_size=1).map(Path)
ENGINES = st.builds(Engine, stage=st.sampled_from([0, 1, 2, 3]), offload=st.booleans(), budget=st.none() | TEXT)
JOBS = st.builds(
    Job,
    data=st.lists(PATHS).map(tuple),
    precision=st.sampled_from(["fp32", "bf16"]),
    learning_rate=FINITE,
    betas=st.tuples(FINITE, FINITE),
    steps=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
    folder=st.none() | PATHS,
    resume=st.none() | TEXT,
    tags=st.lists(TEXT).map(tuple),
    engine=ENGINES,
)


@settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(job=JOBS)
def test_a_file_gives_back_what_was_written(job: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    dump_toml(job, path)
    assert load_toml(path, Job) == job


def test_groups_are_written_as_tables_and_none_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    dump_toml(Job(folder=Path("out"), resume=None), path)
    table = tomllib.loads(path.read_text())
    assert table["engine"] == {"stage": 2, "offload": False}
    assert table["folder"] == "out"
    assert table["resume"] == "None"
    dump_toml(Job(), path)
    assert "folder" not in tomllib.loads(path.read_text())


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Job()


@pytest.mark.parametrize(
    "text",
    ["learning-rate = 1\nstage = 1", "learning_rate = 1.0\n[engine]\nstage = 1", "stage = 1\n\nlearning-rate = 1e0"],
)
def test_names_may_have_dashes_and_groups_may_be_flat(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text) == Job(learning_rate=1.0, engine=Engine(stage=1))


def test_a_group_keeps_the_defaults_it_has_in_its_owner(tmp_path: Path) -> None:
    assert load(tmp_path, "offload = true") == Job(engine=Engine(stage=2, offload=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learningrate = 1.0", r"job\.toml has an unknown option learningrate; did you mean learning_rate\?"),
        ("[engine]\nstag = 1", r"unknown option stag; did you mean stage\?"),
        ("[engine]\nqqq = 1", "unknown option qqq; the options there are budget, offload, stage"),
        ("[steps]\nx = 1", r'option steps as \{"x": 1\}, dict; it needs a whole number'),
        ("engine = 3", "option engine as 3, int; it needs a table of options"),
        ("stage = 1\n[engine]\nstage = 2", "option stage twice"),
        ("steps = 1.0", "option steps as 1.0, float; it needs a whole number"),
        ("steps = true", "option steps as true, bool; it needs a whole number"),
        ("shuffle = 1", "option shuffle as 1, int; it needs true or false"),
        ("learning_rate = '1'", 'option learning_rate as "1", str; it needs a number'),
        ("stage = true", "option stage as true, bool; it needs one of 0, 1, 2, 3"),
        ("precision = 'fp16'", 'option precision as "fp16", str; it needs one of "fp32", "bf16"'),
        ("folder = 1", 'option folder as 1, int; it needs a path or "None"'),
        ("data = 'a'", 'option data as "a", str; it needs a list of paths'),
        ("tags = ['a', 1]", 'option tags as \\["a", 1\\], list; it needs a list of strings'),
        ("betas = [0.9]", r"option betas as \[0\.9\], list; it needs a list of 2: a number and a number"),
        ("steps = 3\nlr = = 4", r"job\.toml is not valid TOML: .*line 2"),
        ("steps = -1", "steps is -1 and must not be negative"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_missing_files_and_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        load_toml(tmp_path / "none.toml", Job)
    with pytest.raises(ConfigError, match="lacks the option name, which has no default"):
        load(tmp_path, "", Needy)
    assert load(tmp_path, "name = 'x'", Needy) == Needy("x")


def test_the_command_line_alone_is_enough() -> None:
    argv = "--data a b --precision bf16 --learning-rate 1 --no-shuffle --folder out --resume None --tags --stage 0"
    assert parse(Job, [*argv.split(), "--offload"], "job") == Job(
        data=(Path("a"), Path("b")),
        precision="bf16",
        learning_rate=1.0,
        shuffle=False,
        folder=Path("out"),
        resume=None,
        tags=(),
        engine=Engine(stage=0, offload=True),
    )
    assert parse(Job, [], "job") == Job()


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_the_command_line_overrides_the_file(tmp_path: Path, form: list[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text("steps = 5\nshuffle = false\n[engine]\nstage = 1\noffload = true\n")
    argv = ["--data", "a", "b", *(word.format(path) for word in form), "--steps", "7", "--no-offload"]
    data = (Path("a"), Path("b"))
    assert parse(Job, argv, "job") == Job(data=data, steps=7, shuffle=False, engine=Engine(stage=1))


def test_help_has_every_option_its_meaning_and_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text("steps = 5")
    with pytest.raises(SystemExit) as stop:
        parse(Job, ["--config", str(path), "--help"], "job")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("Train a model.", "--config FILE", "Peak rate. (default: 0.001)", "(default: 5)", "ZeRO stage."):
        assert words in text
    for option in ("--data", "--learning-rate", "--shuffle, --no-shuffle", "--stage {0,1,2,3}", "--budget"):
        assert option in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--precison", "bf16"], "--precision {fp32,bf16}"),
        (["--steps", "x"], "--steps INT"),
        (["--steps", "-1"], "steps is -1 and must not be negative"),
        (["--config"], "--config"),
    ],
)
def test_unusable_options_exit_with_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Job, argv, "job")
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
