"""This node's number, address and processes: from options, torchrun, SLURM, Kubernetes or the environment."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from zeroshard.errors import ConfigError
from zeroshard.supervisor import fork_server

LOOPBACK, PORT = "127.0.0.1", 29500  # the port is torchrun's default
INSIDE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # ranks listen on the loopback address alone
SLURM_PORTS = (10000, 20000)  # the first, and the count: below those that Linux assigns to clients


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """This node's number in the job, and its processes.

    Attributes:
        nodes: number of nodes.
        node: number of this one, from 0; node 0 decides for all.
        processes: ranks on this node.
        address: address of node 0.
        port: port at which the supervisor of node 0 listens for the others.
        attempt: number of the first attempt.
        nested: whether torchrun started this supervisor for one rank, and restarts it.
    """

    nodes: int = 1
    node: int = 0
    processes: int = 1
    address: str = LOOPBACK
    port: int = PORT
    attempt: int = 0
    nested: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.processes < 1:
            raise ConfigError(f"There are {self.nodes} nodes with {self.processes} processes; both must be 1 or more.")
        if not 0 <= self.node < self.nodes:
            raise ConfigError(
                f"This is node {self.node} and there are {self.nodes}, which count from 0. Give --nnodes and "
                "--node-rank (or PET_NNODES and PET_NODE_RANK) that fit together."
            )
        if not 0 < self.port < 2**16:
            raise ConfigError(f"The port is {self.port}; give a --master-port from 1 to 65535.")


def find_place(
    *,
    nproc_per_node: int | None = None,
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Node:
    """The node that the options give, or else the environment.

    Raises:
        ConfigError: options or variables are missing, or contradict each other.
    """
    given = os.environ if environment is None else environment
    if "RANK" in given and nproc_per_node is None:
        if (nnodes, node_rank, master_addr, master_port) != (None, None, None, None):
            raise ConfigError(
                "RANK is set, so another launcher has placed this process; leave out --nnodes, --node-rank, "
                "--master-addr and --master-port, or give --nproc-per-node as well."
            )
        return Node(attempt=_number(given, "TORCHELASTIC_RESTART_COUNT") or 0, nested=True)
    nodes = _first(nnodes, _number(given, "PET_NNODES", "SLURM_NNODES"), 1)
    names = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_NODEID")
    node = _first(node_rank, _number(given, *names), 0 if nodes == 1 else -1)
    if node == -1:
        raise ConfigError(f"There are {nodes} nodes, and the number of this one is not known; give --node-rank.")
    if nodes == 1:
        address = master_addr or LOOPBACK
    else:
        address = master_addr or given.get("PET_MASTER_ADDR") or given.get("MASTER_ADDR") or _slurm_head(given)
    job = _number(given, "SLURM_JOB_ID")
    by_job = PORT if job is None else SLURM_PORTS[0] + job % SLURM_PORTS[1]
    port = _first(master_port, _number(given, "PET_MASTER_PORT", "MASTER_PORT"), by_job)
    processes = _gpus() or 1 if nproc_per_node is None else nproc_per_node
    return Node(nodes=nodes, node=node, processes=processes, address=address, port=port)


def set_threads(processes: int) -> None:
    """Share the cores among the processes, unless OMP_NUM_THREADS is set; call it before torch is loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))


def environments(place: Node, sizes: list[int], port: int) -> list[dict[str, str]]:
    """The environment of each worker of this node.

    Args:
        sizes: number of processes of each node.
        port: port of the store that the workers join.
    """
    common = {name: value for name, value in os.environ.items() if name != fork_server.VARIABLE}
    if place.nested:
        return [common]
    if place.nodes == 1:
        common = INSIDE | common
    first, world = sum(sizes[: place.node]), sum(sizes)
    common |= {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(place.processes),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the supervisor hosts the store, and every rank is a client
    }
    return [{**common, "RANK": str(first + i), "LOCAL_RANK": str(i)} for i in range(place.processes)]


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _number(given: Mapping[str, str], *names: str) -> int | None:
    """The value of the first of these variables that is set.

    Raises:
        ConfigError: the value is no whole number.
    """
    name = next((name for name in names if given.get(name)), None)
    if name is None:
        return None
    if not given[name].isdecimal():
        raise ConfigError(f"{name} is {given[name]!r} and must be a whole number; set it, or give the option instead.")
    return int(given[name])


def _slurm_head(given: Mapping[str, str]) -> str:
    """The first node of a SLURM job."""
    if "SLURM_JOB_NODELIST" in given:
        command = ["scontrol", "show", "hostnames", given["SLURM_JOB_NODELIST"]]
        try:
            names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
        except (OSError, subprocess.SubprocessError):
            names = []  # no scontrol in this container
        if names:
            return names[0]
    if "SLURM_LAUNCH_NODE_IPADDR" in given:
        return given["SLURM_LAUNCH_NODE_IPADDR"]
    raise ConfigError("There are several nodes, and the address of node 0 is not known; give --master-addr.")


def _gpus() -> int:
    from zeroshard.platform import accelerator  # loads torch, which few commands need

    return accelerator.count()
