"""Comparison of all ranks: a digest when the engine is made, and a checksum of the optimizer's settings per step.

Ranks that differ in a width, a learning rate or a version would otherwise train meaningless weights, or fail inside a
collective without the reason.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import wait_for_ranks
from zeroshard.errors import CommError
from zeroshard.parts.settings import flat
from zeroshard.plan import Plan
from zeroshard.version import __version__

OWN = {"device_memory", "offload.disk"}  # settings of a plan in which ranks on different machines may differ
SHOWN = 4  # differences of one rank in an error
MOST = 3  # ranks in an error

Groups = Sequence[Mapping[str, Any]]


def check_alike(comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Compare versions, plans, models and optimizers over all ranks: a collective call.

    Raises:
        CommError: they differ, with the fields, on all ranks; or a rank did not join.
    """
    wait_for_ranks(comm.mesh, "an engine")
    if comm.mesh.ranks > 1:
        _compare(comm, dict(_facts(model, optimizer, plan)), "the engine's plan, model and optimizer")


def check_settings(comm: Comm, groups: Groups) -> None:
    """Compare the settings of the optimizer's groups over all ranks: a collective call.

    Raises:
        CommError: they differ, with the fields, on all ranks.
    """
    if comm.mesh.ranks > 1:
        _compare(comm, dict(_settings(groups)), "the optimizer's settings")


class Settings:
    """A checksum of the settings of an optimizer's groups, cheap to take anew in each step."""

    def __init__(self) -> None:
        self._seen: list[Any] | None = None
        self._checksum = 0

    def checksum(self, groups: Groups) -> int:
        """The checksum of all settings but the parameters; tensors count only if they are on the CPU."""
        values: list[Any] = []
        for group in groups:
            values += [
                value if not isinstance(value, torch.Tensor) else _plain(value)
                for key, value in group.items()
                if key != "params"
            ]
        if values != self._seen:
            self._seen = values
            self._checksum = zlib.crc32(json.dumps(dict(_settings(groups))).encode())
        return self._checksum


def _compare(comm: Comm, facts: dict[str, str], subject: str) -> None:
    digest = hashlib.sha256(json.dumps(facts).encode()).digest()
    if len(set(comm.agree(digest, f"comparison of {subject}"))) == 1:
        return
    by_rank = comm.agree_on(facts, f"differences in {subject}")
    differing = [rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]]
    differences = [_difference(rank, by_rank[rank], by_rank[0]) for rank in differing[:MOST]]
    if len(differing) > MOST:
        differences.append(f"ranks {', '.join(map(str, differing[MOST:]))} differ too")
    raise CommError(
        f"The ranks differ in {subject}: {'. '.join(differences)}. Every rank must run the same script with the same "
        f"packages, and may choose nothing by its rank or machine but its data."
    )


def _difference(rank: int, theirs: Mapping[str, str], first: Mapping[str, str]) -> str:
    names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
    differences = [f"{name} is {theirs.get(name, 'missing')}, on rank 0 {first.get(name, 'missing')}" for name in names]
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return f"on rank {rank} " + "; ".join(differences[:SHOWN]) + more


def _facts(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Iterator[tuple[str, str]]:
    """Names and values of everything that must be the same on all ranks."""
    yield "the version of zeroshard", __version__
    yield "the version of torch", str(torch.__version__)
    for name, value in flat(plan.as_dict()):
        if name not in OWN:
            yield f"plan.{name}", json.dumps(value, default=str)
    names = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        yield f"parameter '{name}'", _of_tensor(parameter) + ("" if parameter.requires_grad else ", frozen")
    for name, buffer in model.named_buffers():
        yield f"buffer '{name}'", _of_tensor(buffer)
    for name, others in sorted(tied_names(model).items()):
        yield f"the parameter that '{name}' is tied to", str(others)
    yield "the optimizer", f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    for number, group in enumerate(optimizer.param_groups):
        members = "\n".join(sorted(names.get(id(parameter), "?") for parameter in group["params"]))
        yield f"optimizer group {number}: parameters", f"{len(group['params'])} ({zlib.crc32(members.encode()):08x})"
    yield from _settings(optimizer.param_groups)


def _settings(groups: Groups) -> Iterator[tuple[str, str]]:
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                yield f"optimizer group {number}: {key}", json.dumps(_plain(value))


def _of_tensor(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {kind}{' on the meta device' if tensor.is_meta else ''}"


def _plain(value: Any) -> Any:
    """A value as plain JSON, comparable between processes; an object without such a form counts as its class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return type(value).__qualname__


def tied_names(model: nn.Module) -> dict[str, str]:
    """For parameters with several names, each further name and the first; taken before stages are cut."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}
