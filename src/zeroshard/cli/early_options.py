"""Options of commands whose modules load torch: read here first, so that wrong ones are refused within a second."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal

from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.plan import Plan
from zeroshard.text import shard_bytes, wrapped
from zeroshard.train.early_checks import check_checkpoint, check_device, check_place, check_tokenizer
from zeroshard.train.named_models import is_code
from zeroshard.train.option_tree import Positional
from zeroshard.train.option_values import check_least
from zeroshard.train.options import HELP, parse
from zeroshard.validation.rank_count import check_ranks

CHECKPOINT_USAGE = """usage: zeroshard checkpoint ACTION PATH...

  ls [PATH]    checkpoints of a folder, a run, or all runs (default: runs)
  verify PATH  read every byte and compare it with its digest
  info PATH    describe one: facts, tensors, bytes
  diff A B     compare two, whatever plans wrote them

PATH is a checkpoint, or a run folder, which stands for its newest. All take --json."""

LIST = "list"
CLAIMS = (  # names of `zeroshard.reproduce.CLAIMS`, whose module loads torch
    *("zero-figure-1", "zero-table-1", "zero-table-2", "zero-table-2-mp", "zero-volume", "zero-growth"),
    *("zero-configurations", "offload-memory", "offload-wire", "offload-one-device", "gpipe-bubble", "1f1b-bubble"),
    *("interleaved-bubble", "streaming-bubble", "in-flight", "weight-versions", "vgg16-split"),
    *("megatron-collectives", "ptdp-table-1", "ptdp-sizes", "ptdp-tensor-or-pipeline", "ptdp-data-or-model"),
    *("ptdp-microbatch", "ptdp-interleaving", "ptdp-scatter-gather", "switch-parameters", "switch-operations"),
)


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List checkpoints, also those put aside as damaged or left half written."""

    path: Positional[Path] = Path("runs")
    """A checkpoint, a folder of them, a run folder, or a folder of runs."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Describe a checkpoint: facts, tensors, bytes."""

    path: Positional[Path]
    """The checkpoint, or a run folder, which stands for its newest."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(InfoOptions):
    """Read every byte of a checkpoint and compare it with its digest; exit code 1 if anything is wrong."""


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Compare two checkpoints, whatever plans wrote them; exit code 1 if they hold different states."""

    a: Positional[Path]
    """One checkpoint, or a run folder, which stands for its newest."""
    b: Positional[Path]
    """The other."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write the weights and buffers of a checkpoint as safetensors, under the names of the model's state_dict."""

    path: Positional[Path]
    """The checkpoint, or a run folder, which stands for its newest."""
    to: Literal["safetensors"] = "safetensors"
    """The format."""
    out: Path | None = None
    """Folder to write, which must not be there yet; by default NAME-safetensors here, after the checkpoint's name."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of floating-point tensors; by default as saved, which is fp32 where there were master weights."""
    max_shard_size: str = "5GB"
    """Bytes of tensors in one file, at most; a larger tensor has a file of its own."""
    merge: bool = False
    """Of a model of peft: the base with the active adapters added, as from_pretrained of transformers reads it."""
    adapter: str | None = None
    """Of a model of peft: the adapter of this name alone, such as default, as PeftModel.from_pretrained reads it."""
    base_folder: Path | None = None
    """Folder of the frozen base that the checkpoint left out; by default the one from which the run read it."""
    model: str | None = None
    """Of adapters on a model that is none of transformers: the code that makes it, mine.py, mine.py:Net or
    package.module:function."""

    def __post_init__(self) -> None:
        shard_bytes(self.max_shard_size, "max_shard_size")
        if self.out is not None and self.out.exists():
            raise ConfigError(f"out is {self.out}, which exists, and nothing is overwritten; name another folder.")


@dataclass(frozen=True, kw_only=True)
class VerificationOptions:
    """Verify a plan: train a few steps under it and in one process on this machine, and compare them."""

    ELSEWHERE: ClassVar[Mapping[str, tuple[str, str]]] = dict.fromkeys(
        ("batch", "global_batch", "batch_per_rank"), ("rows", "the rows of one step over all ranks")
    )
    plan: Plan = field(default_factory=Plan)
    """The plan to verify."""
    model: str = "tiny"
    """A built-in size (tiny, small, medium, gpt2, gpt2-xl), a Hugging Face folder or config.json (extra: hf), or code
    of your own: mine.py, mine.py:Net or package.module:function."""
    batch_of: str | None = None
    """mine.py:function, from a number of rows to a batch; for your own model; by default the function batch of its
    file."""
    loss_of: str | None = None
    """mine.py:function, of (output, batch) to a mean, or to (sum, count); by default the model's own."""
    optimizer_of: str | None = None
    """mine.py:function, of the parameters to an optimizer, in place of optimizer."""
    optimizer: Literal["adamw", "sgd", "adagrad"] = "adamw"
    """Which torch.optim optimizer."""
    ranks: int | None = None
    """Processes under the plan; by default two for each stage, or two shard groups."""
    rows: int | None = None
    """Rows of one step over all ranks; 2 for each microbatch by default."""
    steps: int = 3
    """Steps to compare."""
    exact: bool = True
    """Compute in fp32 whatever the plan says, so that differences are no rounding; --no-exact keeps its dtypes."""
    json: bool = False
    """Print JSON instead of the screen."""

    def __post_init__(self) -> None:
        check_least(self, dict.fromkeys(("ranks", "rows", "steps"), 1))
        if self.batch_of is not None and not self.own:
            raise ConfigError(f"batch_of is for a model of your own and {self.model} makes its own; leave it out.")

    @property
    def own(self) -> bool:
        """Whether the model is a class or function of the user's code."""
        return is_code(self.model)


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Measure the layers of a model on this machine: the time of each, its activations and its parameters."""

    model: str = "tiny"
    """A built-in size (tiny, small, medium, gpt2, gpt2-xl), a Hugging Face folder or config.json (extra: hf), or code
    of your own: mine.py, mine.py:Net or package.module:function."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json (extra: hf); the text itself is random tokens."""
    sequence: int = 256
    """Tokens per row that the model predicts."""
    rows: int = 4
    """Rows of a microbatch."""
    dropout: float = 0.0
    """Dropout of a built-in model."""
    repeats: int = 5
    """Runs of each layer after one to warm up; their median counts."""
    device: str = "auto"
    """Device to use: cpu, cuda (ROCm too) or another accelerator by torch's name; auto takes one if there is one."""
    out: Path = Path("profile.json")
    """File to write."""
    json: bool = False
    """Print the profile as JSON instead of a table."""

    def __post_init__(self) -> None:
        check_least(self, dict.fromkeys(("sequence", "rows", "repeats"), 1))
        if not 0 <= self.dropout <= 1:
            raise ConfigError(f"dropout is {self.dropout}; it must be between 0 and 1.")
        if self.out.is_dir() or not self.out.absolute().parent.is_dir():
            raise ConfigError(f"{self.out} cannot be written; name a file in a folder that exists.")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check this machine's set-up, and measure what it can do, for the planner."""

    out: Path | None = None
    """File for the measured profile; by default zeroshard/machine.json in the user's folder for caches."""
    quick: bool = False
    """Check only, and measure nothing."""
    json: bool = False
    """Print JSON instead of tables."""
    disk: Path = Path(".")
    """Folder whose disk is checked and measured; runs would be kept there."""

    def __post_init__(self) -> None:
        if self.out is not None and self.quick:
            raise ConfigError("--quick measures nothing, so there is nothing to write to --out; leave out one of them.")
        if self.out is not None and self.out.is_dir():
            raise ConfigError(f"{self.out} is a folder; name a file.")
        if self.out is not None:
            check_place("the folder of out", self.out.parent)


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Compute published numbers again: the published one, ours, the difference, and how ours was obtained."""

    claim: Positional[str] = LIST
    """Name of a claim, or list for one line of each."""
    all: bool = False
    """Compute every claim; some rehearse models of many layers and take a minute or more."""
    json: bool = False
    """Print JSON instead of tables."""

    def __post_init__(self) -> None:
        if self.claim != LIST and self.all:
            raise ConfigError(f"{self.claim} is one claim and all means every one; leave out one of the two.")
        if self.claim not in (LIST, *CLAIMS):
            near = get_close_matches(self.claim, CLAIMS, n=1)
            way_out = f"did you mean {near[0]}?" if near else "`zeroshard reproduce list` names them."
            raise ConfigError(f"There is no claim {self.claim!r}; {way_out}")


CHECKPOINT: Mapping[str, Any] = {"ls": ListOptions, "verify": VerifyOptions, "info": InfoOptions, "diff": DiffOptions}
EARLY: Mapping[str, type] = {
    "export": ExportOptions,
    "verify": VerificationOptions,
    "profile": ProfileOptions,
    "doctor": DoctorOptions,
    "reproduce": ReproduceOptions,
}


def read_checkpoint_action(argv: Sequence[str]) -> tuple[str, Any]:
    """The action of `zeroshard checkpoint` and its options; raises `SystemExit` after the help.

    Raises:
        ConfigError: an unknown action.
    """
    if argv and argv[0] in HELP:
        print(wrapped(CHECKPOINT_USAGE, shutil.get_terminal_size((120, 0)).columns))
        raise SystemExit(0)
    if not argv or argv[0] not in CHECKPOINT:
        found = f"there is no action {argv[0]!r}" if argv else "the action is missing"
        raise ConfigError(f"{found}; write zeroshard checkpoint, then one of {', '.join(CHECKPOINT)}, and a path.")
    return argv[0], parse(CHECKPOINT[argv[0]], argv[1:], f"zeroshard checkpoint {argv[0]}")


def read_early(argv: Sequence[str]) -> None:
    """Read the options of a command once before its module is imported; raises `SystemExit` where they are wrong.

    Raises:
        ConfigError: as `read_checkpoint_action`, and for a file that `--config` names.
        CheckpointError, PlanError: a path, a device or a number of ranks that cannot be.
    """
    if argv[0] == "checkpoint":
        _check_paths(*read_checkpoint_action(argv[1:]))
    elif argv[0] in EARLY:
        options: Any = parse(EARLY[argv[0]], argv[1:], f"zeroshard {argv[0]}")
        if isinstance(options, ExportOptions):
            check_checkpoint(options.path)
        elif isinstance(options, DoctorOptions) and not options.disk.is_dir():
            raise ConfigError(f"disk is {options.disk}, which is no folder; name one that exists.")
        elif isinstance(options, ProfileOptions):
            check_tokenizer(options.tokenizer)
            check_device(options.device)
        elif isinstance(options, VerificationOptions) and options.ranks is not None:
            check_ranks(options.plan, options.ranks)


def _check_paths(action: str, options: Any) -> None:
    if action == "ls":
        if not options.path.is_dir():
            raise CheckpointError(f"{options.path} is no folder; give a checkpoint, a run folder, or a folder of runs.")
        return
    for name in ("a", "b") if action == "diff" else ("path",):
        check_checkpoint(getattr(options, name))
