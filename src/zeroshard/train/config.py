"""All options of the main job, each on the command line and in a TOML file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from zeroshard.data.files import parse_sources
from zeroshard.errors import ConfigError
from zeroshard.moe.policy import Mixture
from zeroshard.plan import RENAMED, Plan, option_of, renamed
from zeroshard.planning.adapters import RANK, AdapterName, Adapters
from zeroshard.text import check_unit
from zeroshard.train.loggers import check_loggers
from zeroshard.train.option_tree import Named
from zeroshard.train.option_values import check_least

OptimizerName = Literal[
    "adamw", "sgd", "adagrad", "adafactor", "sm3", "adamw8bit", "adam8bit", "lamb", "muon", "shampoo", "soap"
]  # fmt: skip
OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")  # of models without tokenizer.json
RENAMED_OPTIONS = {"batch": "batch_per_rank"}  # options of stored run folders, by their earlier names


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model on text: under torchrun, or with --ranks N on this machine."""

    ALIASES: ClassVar[Mapping[str, Sequence[str]]] = {  # option names of other programs
        "ranks": ("--nproc-per-node",),
        "out": ("--output-dir",),
        "learning_rate": ("--lr",),
        "data": ("--dataset",),
    }
    FIRST: ClassVar[Sequence[str]] = (  # fields, here and in the plan, whose options `--help` shows
        *("model", "data", "sequence", "batch_per_rank", "steps", "optimizer", "learning_rate", "out", "resume"),
        *("checkpoint_every", "ranks", "device", "planning", "zero", "precision", "microbatches", "clip_norm"),
        *("recompute", "seed", "device_memory", "pipeline_parallel", "offload"),
    )
    SECTIONS: ClassVar[Mapping[str, str]] = {  # of the help, by their first fields
        **{
            "model": "model and text",
            "sequence": "training",
            "experts": "mixtures of experts",
            "validate_every": "validation and generated text",
        },
        **{"out": "run folder and checkpoints", "rollbacks": "bad steps", "check_replicas": "checks and records"},
        **{"ranks": "ranks and device", "planning": "choice of the plan"},
    }
    ELSEWHERE: ClassVar[Mapping[str, tuple[str, str]]] = {
        "global_batch": ("batch_per_rank", "the rows of one rank: the global batch divided by the number of ranks"),
        **dict.fromkeys(
            ("batch", "batch_size", "micro_batch_size", "per_device_train_batch_size", "train_batch_size"),
            ("batch_per_rank", "the rows of one rank and step, all microbatches together"),
        ),
        **dict.fromkeys(("epochs", "num_train_epochs"), ("steps", "the steps of the whole run")),
        **dict.fromkeys(("bf16", "fp16"), ("precision", "bf16 or fp16")),
        **dict.fromkeys(("gpus", "devices", "num_processes", "world_size"), ("ranks", "one process for each device")),
        **dict.fromkeys(("fsdp", "deepspeed", "zero_stage"), ("zero", "0, 1, 2 or 3")),
        **dict.fromkeys(("cpu_offload", "offload_optimizer"), ("offload", "optimizer, or optimizer,parameters")),
        **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), ("recompute", "blocks, sqrt or auto")),
        **dict.fromkeys(("wandb", "mlflow", "trackio", "tensorboard", "report_to"), ("loggers", "with its name")),
        **dict.fromkeys(("context", "max_length", "block_size", "seq_length"), ("sequence", "tokens of a row")),
        **dict.fromkeys(("max_steps", "iterations"), ("steps", "")),
        **{name: (option_of(setting), "") for name, setting in RENAMED.items()},
    }
    plan: Plan = field(default_factory=lambda: Plan(clip_norm=1.0))
    """How to train."""
    model: str = "tiny"
    """A built-in size (tiny, small, medium, gpt2, gpt2-xl), a Hugging Face folder or config.json (extra: hf), or code
    of your own: mine.py, mine.py:Net or package.module:function."""
    pretrained: bool = True
    """Start from the safetensors files in the folder of a Hugging Face model, where it has them."""
    adapters: AdapterName | None = None
    """Train adapters beside the frozen weights of a Hugging Face folder (lora; extra: peft), or beside weights in 4
    bits (qlora; extras: peft, quantized)."""
    adapter_rank: int = RANK
    """Rank of the adapters, which all linear layers but the output layer get."""
    data: tuple[Path, ...] = ()
    """Text, .jsonl, .parquet, compressed files, folders of them or of Hugging Face data sets, with weights if wanted:
    web.jsonl:3,notes/; by default the running interpreter's standard-library source."""
    tokenizer: str = "auto"
    """bytes, or the path of a tokenizer.json or of its folder (extra: hf); auto is that in the folder of the model, or
    bytes where it has none."""
    columns: tuple[str, ...] = ()
    """Column of text or of messages, or the two of prompt and completion; by default text, content, messages, or prompt
    and completion."""
    truncate: bool = False
    """Cut examples of messages and completions that are longer than a row, instead of refusing them."""
    sequence: int = 256
    """Tokens per row that the model predicts."""
    batch_per_rank: int = 4
    """Rows per rank and step, all microbatches together."""
    steps: int = 800
    """Steps of the whole run."""
    optimizer: OptimizerName = "adamw"
    """Which optimizer: adamw, sgd and adagrad of torch.optim, the others of zs.optim (docs/optimizers.md)."""
    learning_rate: float = 6e-3
    """Highest learning rate, reached after the warm-up."""
    warmup_steps: int = 50
    """Steps over which the learning rate rises from 0."""
    final_learning_rate: float = 0.05
    """Last learning rate as a fraction of the highest; a cosine leads there."""
    weight_decay: float = 0.1
    """Decay of matrices (AdamW: decoupled); norms, biases and other vectors are left out."""
    beta2: float = 0.95
    """Decay of the second moment of AdamW, its 8-bit forms, LAMB and Muon's AdamW; momentum of SGD is 0.9."""
    dropout: float = 0.0
    """Dropout of a built-in model."""
    experts: int = 0
    """Experts in each mixture that replaces a feed-forward layer; 0 for a dense model."""
    experts_every: int = 2
    """Which feed-forward layers become mixtures: each so many."""
    router: str = "switch"
    """Router of the mixtures: switch, gshard, mixtral, deepseek_v3, st_moe, shazeer2017, ..."""
    validate_every: int = 200
    """Steps between validations; 0 validates only at the end."""
    validation_rows: int = 128
    """Rows of held-out text in each validation, over all ranks, at least one for each; the last one uses four times as
    many."""
    sample_tokens: int = 200
    """Tokens to generate at the end; 0 for none."""
    prompt: str = "def "
    """Beginning of the generated text."""
    out: Path = Path("runs")
    """Folder in which the run's own folder is made."""
    resume: Literal["auto", "never"] | Path = "never"
    """Run to resume: "never" starts anew; "auto" resumes the newest unfinished run in `out` of the same model and data,
    if there is one; the path of a run folder or a checkpoint is resumed in a new run."""
    weights: Path | None = None
    """Safetensors file, folder or checkpoint with the weights to start from."""
    checkpoint: bool = True
    """Save checkpoints, during the run and at its end."""
    checkpoint_every: int = 200
    """Steps between checkpoints, which are written while training goes on; 0 saves only at the end."""
    keep: int = 2
    """Number of checkpoints to keep; older ones are removed when a newer one has been read back."""
    rollbacks: int = 0
    """Number of times that the run may go back to the last good checkpoint and leave out the batch when the loss is
    not finite or spikes; with 0 a loss that is not finite ends the run."""
    spike: float | None = None
    """A loss more than this many times the median of the last 50 is bad; by default only one that is not finite."""
    patience: int = 1
    """Consecutive bad steps before a rollback."""
    check_replicas: int = 0
    """Steps between comparisons of the copies of the same weights on several ranks; 0 for none."""
    trace: bool = False
    """Keep a timeline in the run folder and its report: of one step of a pipeline, measured beside simulated, or of
    two steps with offload."""
    loggers: tuple[str, ...] = ()
    """Loggers of the metrics beside the run folder: tensorboard, wandb, mlflow, trackio (extras of these names), or
    code of your own: mine.py:Logger."""
    ranks: int | None = None
    """Processes to start on this machine; under torchrun, the number that it must have started."""
    device: str = "auto"
    """Device to train on: cpu, cuda (ROCm too), or another accelerator by torch's name; auto takes an accelerator when
    there is one for every rank."""
    tables: bool = False
    """Print the tables of memory and traffic at the end, which the report has in any case."""
    planning: Annotated[Literal["given", "auto"], Named("plan")] = "given"
    """Train under the options of the plan ("given"), or under the fastest plan that fits ("auto"), which is searched
    for before the run; options that the search does not choose stay as given."""
    predict: bool = False
    """Predict memory, traffic and time of the given plan, and compare after 20 steps; "auto" always does."""

    def __post_init__(self) -> None:
        positive = (
            "sequence",
            "batch_per_rank",
            "steps",
            "experts_every",
            "validation_rows",
            "keep",
            "patience",
            "ranks",
            "adapter_rank",
        )
        not_negative = ("warmup_steps", "validate_every", "experts", "checkpoint_every", "rollbacks", "check_replicas")
        check_least(self, {**dict.fromkeys(positive, 1), **dict.fromkeys(not_negative, 0), "sample_tokens": 0})
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"learning_rate is {self.learning_rate}; it must be more than 0 and finite.")
        for name in ("final_learning_rate", "dropout", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be between 0 and 1.")
        parse_sources(self.data)  # refuses wrong weights
        self._check_adapters()
        if self.tokenizer == "auto":
            object.__setattr__(self, "tokenizer", _tokenizer_of(self.model))
        if len(self.columns) > 2:
            raise ConfigError(
                f"columns names {len(self.columns)}; it takes one of text or messages, or two of prompt and completion."
            )
        self._check_guard()
        check_loggers(self.loggers)
        if self.experts == 0:
            for name, value, usual in (("router", self.router, "switch"), ("experts_every", self.experts_every, 2)):
                if value != usual:
                    raise ConfigError(f"{name}={value} has no effect without experts; set experts to 2 or more.")
        if self.planning == "auto" and self.trace:
            raise ConfigError(
                "trace needs stages or offload, and --plan auto chooses whether there are any; leave one out."
            )
        if self.trace and not (self.plan.pipelined or self.plan.offloading.kinds):
            raise ConfigError(
                "trace draws the stages of a pipeline, or the copies of offload; set pipeline_parallel to 2 or more, "
                "or offload, or leave trace out."
            )
        if self.batch_per_rank % self.plan.microbatches:
            raise ConfigError(
                f"batch_per_rank is {self.batch_per_rank} and microbatches is {self.plan.microbatches}, which does not "
                f"divide it; make batch_per_rank a multiple of {self.plan.microbatches}."
            )
        if self.plan.device_memory is not None:
            check_unit("device_memory", self.plan.device_memory)
        if not self.prompt:
            raise ConfigError("prompt is empty; generation needs at least one character to start from.")

    @property
    def adapted(self) -> Adapters | None:
        """The adapters that are trained in place of the weights; None without."""
        return None if self.adapters is None else Adapters(self.adapters, self.adapter_rank)

    @property
    def mixture(self) -> Mixture:
        """The mixtures of the model."""
        return Mixture(self.experts, self.experts_every, self.router)

    @staticmethod
    def stored(table: Mapping[str, Any]) -> dict[str, Any]:
        """A file's table, with the options of a run folder of an earlier version under their current names."""
        plan = table.get("plan")
        if not isinstance(plan, Mapping):
            return dict(table)  # not of a run folder, whose file always has the plan's table
        earlier = {name: current for name, current in RENAMED_OPTIONS.items() if current not in table}
        options = {earlier.get(name, name): value for name, value in table.items()}
        if options.pop("tensorboard", False):
            options["loggers"] = ["tensorboard"]
        return {**options, "plan": renamed(plan)}

    def _check_adapters(self) -> None:
        """Refuse options of adapters that do not combine."""
        if self.adapters is None:
            if self.adapter_rank != RANK:
                raise ConfigError(
                    f"adapter_rank is {self.adapter_rank} and no adapters are asked for; add adapters=lora."
                )
            return
        for name, given in (("no-pretrained", not self.pretrained), ("weights", self.weights is not None)):
            if given:
                raise ConfigError(
                    f"adapters={self.adapters} lie beside the weights in the folder of the model, and {name} leaves "
                    f"these aside; leave out one of the two."
                )

    def _check_guard(self) -> None:
        """Refuse options of the loss guard that do not combine."""
        if self.spike is not None and not 1 < self.spike < float("inf"):
            raise ConfigError(f"spike is {self.spike}; it must be more than 1 and finite.")
        if self.rollbacks == 0:
            for name, value, off in (("spike", self.spike, None), ("patience", self.patience, 1)):
                if value != off:
                    raise ConfigError(f"{name}={value} has no effect without rollbacks; set rollbacks to 1 or more.")
            return
        if self.plan.streams:
            raise ConfigError(
                f"rollbacks and schedule={self.plan.pipeline.schedule!r} do not combine: its stages never know the "
                f"loss at the same time. Use schedule='1f1b', or leave rollbacks out."
            )
        if not self.checkpoint:
            raise ConfigError("rollbacks needs checkpoints to go back to; leave --no-checkpoint out.")
        if self.patience > 1 and self.plan.nonfinite == "raise" and not self.plan.scales_loss:
            raise ConfigError(
                f"patience={self.patience} tolerates bad steps and nonfinite='raise' does not; set nonfinite='skip'."
            )


def _tokenizer_of(model: str) -> str:
    """The folder of a Hugging Face model with a tokenizer, else "bytes".

    Raises:
        ConfigError: its tokenizer is in another form than a tokenizer.json.
    """
    folder = Path(model).parent if model.endswith(".json") else Path(model)
    if (folder / "tokenizer.json").is_file():
        return str(folder)
    other = next((name for name in OTHER_TOKENIZERS if (folder / name).is_file()), None)
    if other is not None and (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has {other} and no tokenizer.json. Write one with "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}), or name a "
            f"tokenizer, such as bytes."
        )
    return "bytes"
