"""Errors of ranks that did different things, each with the error after which a rank had gone on."""

from collections.abc import Sequence

import torch.distributed as dist

from zeroshard.comm.mesh import CAUGHT, Mesh
from zeroshard.comm.rendezvous import give_up
from zeroshard.errors import CommError

MOST = 3  # ranks in an error
Wait = tuple[int, str, Sequence[str]]  # a rank, the operation that it waits for, and the error after which it went on


def disagreement(one: Wait, other: Wait) -> CommError:
    """The error of two ranks that wait for different operations."""
    return CommError(
        f"The ranks disagree about what comes next: rank {one[0]} waits for '{one[1]}', rank {other[0]} for "
        f"'{other[1]}'. Every rank must call forward, backward and step equally often and in the same order."
        f"{went_on(one[0], one[2])}{went_on(other[0], other[2])}"
    )


def went_on(rank: int, caught: Sequence[str]) -> str:
    """A sentence about an error in a pass after which a rank went on; empty without one."""
    return "".join(f" Rank {rank} had gone on after an error in a pass ({text})." for text in caught)


def note_error(mesh: Mesh, text: str) -> None:
    """Note an error in a pass after which this rank goes on, for its own errors and for ranks that wait for it."""
    mesh.caught.append(text)
    if mesh.failures is not None:
        try:
            mesh.failures.set(CAUGHT, went_on(mesh.rank, [text]))
        except dist.DistError:
            give_up(mesh.failures)


def noted_error(mesh: Mesh) -> str:
    """A sentence about the latest error so noted by any rank; empty without one.

    Raises:
        DistError: the store is gone.
    """
    store = mesh.failures
    return store.get(CAUGHT).decode() if store is not None and store.check([CAUGHT]) else ""


def at_unlike_batches(counts: Sequence[int], errors: Sequence[Sequence[str]], step: int) -> CommError:
    """The error of ranks that left unlike numbers of passes ([Note: left passes]).

    Args:
        counts: of all ranks; `errors` are those after which they went on.
    """
    least = min(counts)
    ahead = [rank for rank, count in enumerate(counts) if count > least]
    texts = [f"rank {rank} left {_number(counts[rank] - least)}{_after(errors[rank])}" for rank in ahead[:MOST]]
    more = f", and ranks {', '.join(map(str, ahead[MOST:]))} did so too" if ahead[MOST:] else ""
    return CommError(
        f"The ranks are at unlike batches: {'; '.join(texts)}{more}, which rank {counts.index(least)} did not. "
        f"Step {step + 1} was not taken, and its gradients are gone. Let errors end the job, or let all ranks "
        f"call engine.discard_batch() for the same batch, when torch.distributed.all_reduce() before "
        f"engine.backward() says that one failed. Forwards that train nothing belong under torch.no_grad()."
    )


def _number(count: int) -> str:
    return f"{count} pass{'es' if count > 1 else ''} without a whole backward"


def _after(caught: Sequence[str]) -> str:
    return f" (after {caught[0]})" if caught else ""
