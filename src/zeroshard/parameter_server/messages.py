"""Messages between the server and workers on other ranks: requests and replies over the mesh's control group.

A worker has one pending request: a frame (push or leave; which gradients exist) and for a push the gradients. The
reply is a frame and the weights. On the server's rank a thread of its own serves each worker.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import astuple
from enum import IntEnum

import torch

from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.errors import CommError
from zeroshard.parameter_server.server import Reply, Server, Wire

SERVER = 0  # its rank
TEXT_BYTES = 512  # bytes of an error's text that are sent


class MessageKind(IntEnum):
    """The kind of a reply."""

    WEIGHTS = 0
    WAIT = 1  # another reply follows
    FAILURE = 2  # the error's text follows


def exchange(comm: Comm, wire: Wire, present: Sequence[bool] | None) -> Reply:
    """`Server.exchange` by messages, for the worker of this rank.

    Raises:
        CommError: the run has failed elsewhere, or the server's rank is gone.
    """
    request = torch.tensor([present is not None, *(present or [False] * len(wire.views))])
    sent = [comm.send(request, SERVER, Purpose.CONTROL, "request to the parameter server")]
    if present is not None:
        sent += [comm.send(buffer, SERVER, Purpose.REPAY_GRADIENTS, "gradients") for buffer in wire.buffers]
    for message in sent:
        message.wait()
    kind, reply = MessageKind.WAIT, None
    while kind is MessageKind.WAIT:
        frame = torch.empty(5, dtype=torch.float64)
        comm.receive(frame, SERVER, Purpose.CONTROL, "reply of the parameter server").wait()
        kind = MessageKind(int(frame[0]))
        reply = Reply(int(frame[1]), int(frame[2]), int(frame[3]), float(frame[4]))
    if kind is MessageKind.FAILURE:
        text = torch.empty(TEXT_BYTES, dtype=torch.uint8)
        comm.receive(text, SERVER, Purpose.CONTROL, "failure of the run").wait()
        raise CommError(text.numpy().tobytes().decode(errors="ignore").strip())
    for buffer in wire.buffers:
        comm.receive(buffer, SERVER, Purpose.LEND_WEIGHTS, "weights").wait()
    assert reply is not None
    return reply


def attend(server: Server, comm: Comm, worker: int, wire: Wire) -> None:
    """Serve a worker of another rank until it has finished or the run has failed; the body of a thread.

    Args:
        comm: used by this thread alone.
        wire: likewise.
    """

    def respond(kind: MessageKind, reply: Reply) -> None:
        frame = torch.tensor([kind, *astuple(reply)], dtype=torch.float64)
        comm.send(frame, worker, Purpose.CONTROL, "reply of the parameter server").wait()

    try:
        pushes = True
        while pushes:
            request = torch.empty(1 + len(wire.views), dtype=torch.bool)
            comm.receive(request, worker, Purpose.CONTROL, "request to the parameter server").wait()
            pushes, *present = request.tolist()
            for buffer in wire.buffers if pushes else ():
                comm.receive(buffer, worker, Purpose.REPAY_GRADIENTS, "gradients").wait()
            reply = server.exchange(
                worker, wire, present if pushes else None, lambda: respond(MessageKind.WAIT, Reply(0, 0))
            )
            respond(MessageKind.WEIGHTS, reply)
            for buffer in wire.buffers:
                comm.send(buffer, worker, Purpose.LEND_WEIGHTS, "weights").wait()
    except BaseException as error:
        server.fail(CommError(f"worker {worker} is gone before its finish(): {error}"))  # an earlier failure stays
        with contextlib.suppress(CommError):  # the worker itself may be gone
            respond(MessageKind.FAILURE, Reply(0, 0))
            text = server.failure_text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)
            message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            comm.send(message, worker, Purpose.CONTROL, "failure of the run").wait()
