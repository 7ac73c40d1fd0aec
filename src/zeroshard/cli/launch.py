"""`zeroshard launch slurm|k8s`: the files that run a job on a cluster, one supervisor (`zeroshard run`) per node.

They are rendered from the templates in `clusters/`; nothing is submitted, and no cluster is contacted.
"""

import json
import re
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import jinja2

from zeroshard.errors import ConfigError
from zeroshard.text import parse_bytes, wrapped
from zeroshard.train.option_values import check_least

STOPPED, WRONG = 75, 2  # exit codes of a run: saved on request, and wrong options, data or model
MEBI = 2**20
MARGIN = 10  # seconds between the ends of the ranks and of the supervisor
# names on a cluster, without characters that need quotes
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(,[A-Za-z0-9][A-Za-z0-9_.-]*)*")
LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # RFC 1035, as a Service requires it
DOTTED_LABELS = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
PROGRAM = re.compile(r"[^-].*")  # not an option
MOUNT = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")
TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)")
LABEL_LENGTH = 63  # of a part of a host name, RFC 1035


@dataclass(frozen=True, kw_only=True)
class JobOptions(ABC):
    """Options of a job on any cluster."""

    name: str = "zeroshard"
    """Name of the job."""
    nodes: int = 1
    """Number of machines."""
    gpus_per_node: int = 0
    """GPUs of each, with a process for each GPU; 0 is a job on CPUs."""
    processes_per_node: int | None = None
    """Without GPUs: processes on each machine; 1 by default."""
    cpus_per_process: int = 1
    """Cores, and threads, of each process."""
    python: str = "python3"
    """The Python that has zeroshard, by name or by its path on the machines."""
    grace: int = 120
    """Seconds from the request to stop to the end, in which the run saves."""
    dry_run: bool = False
    """Print the file."""
    out: Path | None = None
    """Write the file into this folder."""

    TEMPLATE: ClassVar[str]
    SUFFIX: ClassVar[str]
    SUBMIT: ClassVar[str]

    def __post_init__(self) -> None:
        positive = ("nodes", "cpus_per_process", "processes_per_node")
        check_least(self, {**dict.fromkeys(positive, 1), "gpus_per_node": 0, "grace": 2 * MARGIN})
        if self.gpus_per_node and self.processes_per_node is not None:
            raise ConfigError("each GPU has one process; leave out --gpus-per-node or --processes-per-node.")
        check("python", self.python, PROGRAM, "the name or the path of a program")
        check_printable("python", [self.python])

    @property
    def processes(self) -> int:
        """Processes on each machine."""
        return self.gpus_per_node or self.processes_per_node or 1

    @abstractmethod
    def render(self, job: Sequence[str]) -> str:
        """The file for a job whose supervisors run the command `job`."""

    def supervisor(self) -> list[str]:
        """The command of each machine, up to the --; the supervisor reads the machine's number from its environment."""
        counts = ["--nnodes", str(self.nodes), "--nproc-per-node", str(self.processes)]
        return [self.python, "-m", "zeroshard", "run", *counts, "--grace", str(self.grace - MARGIN)]


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(JobOptions):
    """Render a batch script for SLURM; `zeroshard run` runs the words after --."""

    time: str
    """Time limit, as HH:MM:SS or D-HH:MM:SS."""
    partition: str | None = None
    """Partition, or several with commas between them."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Feature that the machines must have."""
    memory: str | None = None
    """Memory of each machine, such as 64GiB; by default the partition's default."""
    workdir: str | None = None
    """Folder to run in; by default the one in which the script is submitted."""

    TEMPLATE: ClassVar[str] = "slurm.sbatch.j2"
    SUFFIX: ClassVar[str] = ".sbatch"
    SUBMIT: ClassVar[str] = "sbatch"

    def __post_init__(self) -> None:
        super().__post_init__()
        check("name", self.name, NAME, "letters, digits, dots, dashes and underscores")
        for option in ("partition", "account", "qos", "constraint"):
            check(option, getattr(self, option), NAMES, "names of letters, digits, dots, dashes and underscores")
        check("time", self.time, TIME, "HH:MM:SS or D-HH:MM:SS")
        check("workdir", self.workdir, PROGRAM, "a path")
        check_printable("workdir", [self.workdir or ""])
        if 2 * self.grace > self.seconds:
            raise ConfigError(
                f"grace is {self.grace} of the {self.seconds} seconds that the job may take; it must be at most half, "
                "so that the job makes progress between two stops."
            )

    @property
    def seconds(self) -> int:
        """The time limit."""
        match = TIME.fullmatch(self.time)
        assert match is not None
        days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    def render(self, job: Sequence[str]) -> str:
        """The batch script."""
        memory = None if self.memory is None else mebibytes("memory", self.memory)
        supervisor, command = Verbatim(shlex.join(self.supervisor())), Verbatim(shlex.join(job))
        return _rendered(self, _for_shell, memory=memory, supervisor=supervisor, command=command)


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions(JobOptions):
    """Render a Job and its Service for Kubernetes; `zeroshard run` runs the words after --."""

    image: str
    """Container image that has zeroshard."""
    claim: str
    """Claim of the volume with the data and the runs; with several machines all of them must be able to write it."""
    memory: str
    """Memory of each pod, such as 64GiB, shared memory included."""
    shm: str = "1GiB"
    """Limit on shared memory, under /dev/shm, which is part of the pod's memory."""
    mount: str = "/data"
    """Path of the volume in the pods, in which the command runs."""
    namespace: str | None = None
    """Namespace; by default kubectl's current one."""
    port: int = 29500
    """Port at which the processes find each other."""
    retries: int = 3
    """Failures after which a pod is restarted; disruptions and saved stops do not count."""

    TEMPLATE: ClassVar[str] = "k8s.yaml.j2"
    SUFFIX: ClassVar[str] = ".yaml"
    SUBMIT: ClassVar[str] = "kubectl apply -f"

    def __post_init__(self) -> None:
        super().__post_init__()
        lower = "lower-case letters, digits and dashes"
        check("name", self.name, LABEL, f"{lower}, and begin with a letter")
        check("namespace", self.namespace, LABEL, lower)
        check("claim", self.claim, DOTTED_LABELS, f"{lower}, and dots")
        check("image", self.image, IMAGE, "the name of an image, such as zeroshard:0.1")
        longest = LABEL_LENGTH - len(f"-{self.nodes - 1}")
        if len(self.name) > longest:
            raise ConfigError(
                f"name has {len(self.name)} characters; at most {longest} leave room in a host name for the pod's "
                f"number."
            )
        check("mount", self.mount, MOUNT, "an absolute path of letters, digits, dots, dashes and underscores")
        if not 1024 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be from 1024 to 65535.")
        check_least(self, {"retries": 0})
        if mebibytes("shm", self.shm) >= mebibytes("memory", self.memory):
            raise ConfigError(f"shm is {self.shm} of {self.memory} of memory; it counts as memory, so it must be less.")

    def render(self, job: Sequence[str]) -> str:
        """The Service and the Job, as YAML."""
        whole = [*self.supervisor(), "--", *job]
        command = [word.replace("$", "$$") for word in whole]  # or Kubernetes would fill in $(NAME)
        memory, shm = mebibytes("memory", self.memory), mebibytes("shm", self.shm)
        return _rendered(self, json.dumps, memory=memory, shm=shm, command=command)


CLUSTERS: dict[str, type[JobOptions]] = {"slurm": SlurmOptions, "k8s": KubernetesOptions}

USAGE = """usage: zeroshard launch CLUSTER [OPTIONS] -- train ... | script.py ...

Print or write the file that runs a job on a cluster, with a supervisor (zeroshard run) on every node. Nothing is
submitted.

  slurm  a batch script for sbatch
  k8s    a Job for kubectl

zeroshard launch CLUSTER --help lists the options of a cluster, such as --nodes; --dry-run prints the file, and
--out DIR writes it there."""


def run_launch(argv: Sequence[str]) -> None:
    """Print or write the file that the options ask for.

    Raises:
        ConfigError: no such cluster, a wrong option or command, or a file that exists.
    """
    from zeroshard.train.options import HELP, parse

    own, job = split(argv)
    if own and own[0] in HELP:
        print(wrapped(USAGE, shutil.get_terminal_size((120, 0)).columns))
        return
    if not own or own[0] not in CLUSTERS:
        found = f"there is no cluster {own[0]!r}" if own else "the cluster is missing"
        raise ConfigError(f"{found}; write zeroshard launch slurm or zeroshard launch k8s, options, --, and a command.")
    options = parse(CLUSTERS[own[0]], own[1:], f"zeroshard launch {own[0]}")
    if options.dry_run == (options.out is not None):
        raise ConfigError(
            "zeroshard writes the file and submits nothing: --dry-run prints it, --out DIR writes it there, and then "
            f"`{options.SUBMIT} FILE` submits it."
        )
    text = options.render(resuming(job))
    if options.out is None:
        print(text, end="")
        return
    path = options.out / (options.name + options.SUFFIX)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); remove what is there, or name another job or folder."
        ) from error
    print(f"submit it with: {options.SUBMIT} {shlex.quote(str(path))}")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first --, and those after it."""
    place = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:place]), list(argv[place + 1 :])


def resuming(job: Sequence[str]) -> list[str]:
    """The command with the options by which a restarted job resumes.

    Raises:
        ConfigError: no command that can be supervised, one that would not resume, or one with unprintable characters.
    """
    if not job or (job[0] != "train" and not job[0].endswith(".py")):
        found = f"{job[0]!r} cannot be supervised" if job else "there is no command"
        raise ConfigError(f"{found}; write `-- train ...` or `-- script.py ...` at the end.")
    check_printable("the command", job)
    if job[0] != "train":
        return list(job)
    given = [value for word, value in zip(job, [*job[1:], ""], strict=True) if word == "--resume"]
    given += [word.partition("=")[2] for word in job if word.startswith("--resume=")]
    if not given:
        return [*job, "--resume", "auto"]
    if set(given) != {"auto"}:
        raise ConfigError(
            f"--resume {given[0]} would begin there again whenever the cluster starts the job anew; leave it out, "
            "and the job goes on with the newest unfinished run in --out."
        )
    return list(job)


def check(option: str, value: str | None, pattern: re.Pattern[str], wanted: str) -> None:
    """Raise ConfigError unless an option that was given matches."""
    if value is not None and not pattern.fullmatch(value):
        raise ConfigError(f"{option} is {value!r}; it must be {wanted}.")


def check_printable(option: str, values: Sequence[str]) -> None:
    """Raise ConfigError for a value that cannot be printed, such as one with a line break."""
    for value in values:
        if not value.isprintable():
            raise ConfigError(f"{option} has {value!r}; all characters must be printable.")


def mebibytes(option: str, size: str) -> int:
    """A size such as 64GiB in whole MiB.

    Raises:
        ConfigError: not a size, or less than 1 MiB.
    """
    try:
        whole = parse_bytes(size) // MEBI
    except ConfigError:
        whole = 0
    if not whole:
        raise ConfigError(f"{option} is {size!r}; write a size of at least 1MiB, such as 64GiB.")
    return whole


class Verbatim(str):
    """Text that is quoted already."""


def _for_shell(value: Any) -> str:
    return value if isinstance(value, Verbatim) else shlex.quote(str(value))


def _rendered(options: JobOptions, quoted: Callable[[Any], str], **more: Any) -> str:
    """The template with the options filled in; `quoted` escapes every value, so that none can end its quotes."""
    environment = jinja2.Environment(
        finalize=quoted,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # for HTML; `finalize` is what escapes here
    )
    text = resources.files("zeroshard.cli").joinpath("clusters", options.TEMPLATE).read_text(encoding="utf-8")
    values = {**vars(options), "processes": options.processes, "stopped": STOPPED, "wrong": WRONG, **more}
    return environment.from_string(text).render(values)
