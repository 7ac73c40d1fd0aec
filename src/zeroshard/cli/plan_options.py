"""The options of `zeroshard plan`, read and checked before torch is imported."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from zeroshard.doctor.hardware import Machines
from zeroshard.doctor.profile import MachineProfile, default_path
from zeroshard.errors import ConfigError
from zeroshard.planning.adapters import RANK, AdapterName
from zeroshard.planning.offers import Site
from zeroshard.tensor.choice import divisions
from zeroshard.text import check_unit, parse_bytes
from zeroshard.train.config import OptimizerName
from zeroshard.train.model_shape import configuration, stated_dtype
from zeroshard.train.named_models import code_named, is_code, model_named
from zeroshard.train.options import parse

THIS_MACHINE, MODEL = "this machine", "tiny"
ROWS, SEQUENCE = 4, 1024  # rows per device; tokens for a model without a context length
Precision = Literal["fp32", "bf16", "fp16"]
HALVES: tuple[Precision, ...] = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Look for plans that fit and are fast, before anything runs: the engine itself is rehearsed under each of them."""

    ELSEWHERE: ClassVar[Mapping[str, tuple[str, str]]] = dict.fromkeys(
        ("batch_per_rank", "batch", "rows"), ("global_batch", "the rows of one step over all devices")
    )
    model: str = MODEL
    """A built-in size (tiny, small, medium, gpt2, gpt2-xl), a Hugging Face folder or config.json (extra: hf), or code
    of your own: mine.py, mine.py:Net or package.module:function."""
    batch_of: str | None = None
    """mine.py:function, from a number of rows to a batch; for your own model, unless that takes tokens as language
    models do; by default the function batch of its file."""
    gpus: int | None = None
    """Number of all devices; 1 by default."""
    gpu: str = THIS_MACHINE
    """Name of the device, such as A100-80, or a TOML file of one; by default this machine, as zeroshard doctor measured
    it."""
    profile: Path | None = None
    """Profile of this machine, as zeroshard doctor wrote it; by default in the place where it writes."""
    gpu_memory: str | None = None
    """Memory of each device, such as 32GiB; by default all of it."""
    host_memory: str | None = None
    """Host memory of each node, such as 512GiB."""
    cluster: Path | None = None
    """TOML file of the devices, the nodes and the links."""
    per_node: int | None = None
    """Devices in one node; 8 by default."""
    global_batch: int | None = None
    """Rows of one step, over all devices; 4 per device by default."""
    sequence: int | None = None
    """Tokens of a row; by default the context of a built-in size, else 1024, or the model's positions if fewer."""
    optimizer: OptimizerName = "adamw"
    """Which optimizer: adamw, sgd and adagrad of torch.optim, the others of zs.optim (docs/optimizers.md)."""
    precision: Precision | None = None
    """Dtype of computation of all plans; by default 16 bits if the device computes in them, and fp32 if it does not, or
    if the model's config.json says float32."""
    tensor_parallel: int | None = None
    """Ranks that split each layer in all plans, 2 or more; by default every number that divides the devices of a node
    is tried."""
    adapters: AdapterName | None = None
    """Train adapters beside the frozen model (LoRA), or beside one in 4 bits (QLoRA); by default where nothing else
    fits."""
    adapter_rank: int = RANK
    """Rank of the adapters, which all linear layers but the output layer get."""
    offload: bool = False
    """Try plans with offload to host memory even if others fit; if none does, they are tried in any case."""
    top: int = 5
    """Number of plans to show."""
    explain: int | None = None
    """Explain the plan of this number: memory over the step, timeline, traffic, time; with tensor parallelism, how
    each layer is split and why others are whole."""
    pictures: Path = Path("runs/plans")
    """Folder of the pictures of the plan that is explained."""
    largest: bool = False
    """Look for the largest GPT instead that trains on these devices, under each stage of ZeRO."""
    out: Path | None = None
    """Write the best plan into this TOML file, which zeroshard train --config takes."""
    write: tuple[int, Path] | None = None
    """Write the plan of this number into this TOML file."""
    html: Path | None = None
    """Write a page of all plans into this file: memory against time, a table to sort, and each plan by itself."""
    fresh: bool = False
    """Search again even if the same question was answered before."""
    params: float | None = None
    """Only print the formulas of the ZeRO paper, for so many parameters, such as 7.5e9."""
    ranks: int | None = None
    """With params, the number of ranks."""
    json: bool = False
    """Print JSON instead of tables."""

    def __post_init__(self) -> None:
        for name in ("gpus", "per_node", "global_batch", "sequence", "top", "explain", "ranks", "adapter_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more.")
        if self.tensor_parallel is not None and self.tensor_parallel < 2:
            raise ConfigError(f"tensor_parallel is {self.tensor_parallel}; it must be 2 or more, or left out.")
        for name in ("gpu_memory", "host_memory"):
            value = getattr(self, name)
            check_unit(name, value or "")
            try:
                if value is not None and not parse_bytes(value):
                    raise ConfigError(f"memory is {value!r}; it must be more than 0.")
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        for name, number in (("explain", self.explain), ("write", self.write and self.write[0])):
            if number is not None and not 1 <= number <= self.top:
                raise ConfigError(
                    f"{name} names plan {number} and top is {self.top}; use 1 to {self.top}, or raise top."
                )
        if self.cluster is not None:
            given = {
                "gpus": self.gpus,
                "gpu": self.gpu != THIS_MACHINE,
                "per_node": self.per_node,
                "profile": self.profile,
            }
            for name in (name for name, value in given.items() if value):
                raise ConfigError(f"the cluster file lists the devices; leave out {name}, or cluster.")
        if self.gpu != THIS_MACHINE and self.profile is not None:
            raise ConfigError(f"profile is of this machine and gpu is {self.gpu}; leave out one of the two.")
        if self.gpu == THIS_MACHINE and self.per_node is not None:
            raise ConfigError("per_node is for devices in several nodes; name them with gpu, or leave it out.")
        if self.adapters is None and self.adapter_rank != RANK:
            raise ConfigError(f"adapter_rank is {self.adapter_rank} and no adapters are asked for; add adapters=lora.")
        self._check_largest()
        self._check_formulas()

    @property
    def own(self) -> bool:
        """Whether the model is a class or function of the user's code."""
        return is_code(self.model)

    @property
    def files(self) -> list[Path]:
        """The files to write, in which an answer on the disk has them too."""
        return [path for path in (self.out, self.write and self.write[1], self.html) if path]

    @property
    def fields(self) -> dict[str, Any]:
        """The fields given for all plans."""
        given = {"precision": self.precision, "tensor_parallel": self.tensor_parallel}
        return {name: value for name, value in given.items() if value is not None}

    def _check_largest(self) -> None:
        given = {"model": self.model != MODEL, "batch_of": self.batch_of, "explain": self.explain, "out": self.out}
        given |= {"tensor_parallel": self.tensor_parallel, "adapters": self.adapters, "html": self.html}
        for name in (name for name, value in {**given, "write": self.write}.items() if value and self.largest):
            raise ConfigError(f"--largest searches the built-in GPT in all sizes and takes no {name}; leave it out.")

    def _check_formulas(self) -> None:
        if self.params is None and self.ranks is not None:
            raise ConfigError("ranks is for the formulas; add params, or say gpus.")
        if self.params is not None and not 1 <= self.params < float("inf"):
            raise ConfigError(f"params is {self.params}; it must be 1 or more and finite.")
        if self.params is not None and (self.ranks is None) == (self.gpus is None):
            raise ConfigError("params needs the number of ranks, once; say ranks, or gpus.")
        given: dict[str, object] = {"model": self.model != MODEL, "gpu": self.gpu != THIS_MACHINE}
        given |= {"cluster": self.cluster, "gpu_memory": self.gpu_memory, "host_memory": self.host_memory}
        given |= {"out": self.out, "html": self.html}
        for name in (name for name, value in given.items() if value and self.params is not None):
            raise ConfigError(f"params only prints the formulas, which take no {name}; leave out {name}, or params.")


def read_question(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[PlanOptions, Machines | None]:
    """The options, and the machines that they describe; None with `params`, which needs none.

    Args:
        environment: the process's variables.

    Raises:
        ZeroshardError: wrong options, a model or a device that does not exist, or a file that cannot be written.
    """
    options = parse(PlanOptions, argv, "zeroshard plan")
    if options.params is not None:
        return options, None
    model_named(options.model)
    _refuse_quantised(options)
    if not options.own and options.batch_of is not None:
        raise ConfigError(f"batch_of is for a model of your own and {options.model} makes its own; leave it out.")
    if options.batch_of is not None and code_named(options.batch_of) is None:
        raise ConfigError(f"batch_of={options.batch_of} names no function; write mine.py:function or module:function.")
    for path in options.files:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written; name a file in a folder that exists.")
    machines = described_machines(options, options.profile or default_path(environment))
    _check_tensor_ranks(options.tensor_parallel, machines)
    return options, machines


def _check_tensor_ranks(asked: int | None, machines: Machines) -> None:
    """Refuse ranks that do not divide the devices, before torch is imported.

    Raises:
        ConfigError: no layer is split among so many.
    """
    if asked is None:
        return
    node = min(machines.per_node, machines.count)
    site = Site(machines.count, machines.per_node, 0, lambda: 0)  # rows and blocks make no difference
    ways = [divided.together for divided in divisions(site) if divided.together > 1]
    if asked not in ways:
        way = f"set it to {' or '.join(map(str, ways))}" if ways else "leave it out"
        raise ConfigError(
            f"tensor_parallel is {asked}, and a layer is split among devices of one node, of which there are {node}, "
            f"in equal groups; {way}."
        )


def _refuse_quantised(options: PlanOptions) -> None:
    """Refuse configurations of frozen weights in 4 or 8 bits, which are planned as QLoRA alone.

    Raises:
        ConfigError: the configuration has them, and no such adapters are asked for.
    """
    table = None if options.own or options.largest else configuration(options.model)
    quantised = (table or {}).get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if method == "bitsandbytes" and options.adapters != "qlora":
        raise ConfigError(
            f"{options.model} has weights that are quantised by {method}, which are not trained themselves; add "
            f"--adapters qlora, or take quantization_config out of the file to plan for all weights."
        )


def precision_for(options: PlanOptions, machines: Machines) -> Precision:
    """The dtype of computation: the one that is asked for, or by the device and the model's configuration."""
    given = options.precision
    if given is not None:
        return given
    if machines.device.kind == "cpu" or (not options.own and stated_dtype(options.model) == "float32"):
        return "fp32"
    return next((name for name in HALVES if name in machines.device.matrix_flops), "fp32")


def described_machines(options: PlanOptions, profile: Path) -> Machines:
    """The machines that the options describe.

    Args:
        profile: of this machine.

    Raises:
        ConfigError, PlanError: no profile of this machine, no such device, or a file that describes none.
    """
    if options.cluster is not None:
        machines = Machines.load(options.cluster)
    elif options.gpu == THIS_MACHINE:
        machines = _this_machine(profile, options.gpus or 1)
    else:
        machines = Machines.of(options.gpu, options.gpus or 1, options.per_node)
    if options.gpu_memory is not None:
        device = replace(machines.device, memory_bytes=parse_bytes(options.gpu_memory))
        machines = replace(machines, device=device)
    if options.host_memory is not None:
        machines = replace(machines, host_memory=parse_bytes(options.host_memory))
    return machines


def _this_machine(profile: Path, count: int) -> Machines:
    if not profile.exists():
        raise ConfigError(
            f"No device is named, and this machine was not measured ({profile} is missing): name one with --gpu, such "
            f"as --gpu A100-80, or measure this machine with `zeroshard doctor`."
        )
    measured = MachineProfile.load(profile)
    return measured.machines(count, measured.transport)
