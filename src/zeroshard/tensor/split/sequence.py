"""Sequence parallelism: between the split layers of blocks, each rank has its own positions of every sequence.

2205.05198, section 4.2.2. The first block of a stack cuts its input, the last joins its output; column-parallel layers
gather, row-parallel ones reduce-scatter. A module that reads the number of positions (attention) is opened: it gets
the rows of all ranks, so that positions, masks and shapes inside are those of whole sequences.

[Note: parts of blocks that are recomputed] A recomputed region may lie inside of a block, so that the block's hooks do
not run again (transformers recomputes the body of a block's forward). So a hook on the gradient of each block's output
restores the zones of its forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import BatchError, ModelError
from zeroshard.tensor.split.collectives import SEQUENCE, CutRows, JoinRows, TensorRanks, Zone, Zones
from zeroshard.tensor.split.layers import Entrance
from zeroshard.tensor.split.returned import ReturnedActivations
from zeroshard.units.hooks import Hook, listen

HIDDEN = "hidden_states"  # the keyword of the activation in blocks of transformers


class SequenceBlocks:
    """The hooks of a stack of blocks.

    Args:
        returned: is told of the activations between blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        ranks: TensorRanks,
        zones: Zones,
        returned: ReturnedActivations,
    ) -> None:
        self._ranks, self._zones, self._returned = ranks, zones, returned
        self._first, self._last = blocks[0][1], blocks[-1][1]
        self._names = {module: name for name, module in blocks}
        for _, module in blocks:
            module.register_forward_pre_hook(Hook(self._enter), with_kwargs=True)
            module.register_forward_hook(Hook(self._leave))
        model.register_forward_hook(Hook(self._end))

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        """Check the end of the forward.

        Raises:
            ModelError: sequences were not joined.
        """
        if self._zones.around is Zone.SEQUENCE and torch._C._current_graph_task_id() == -1:
            raise ModelError(
                f"{self._names[self._last]!r}, where sequence parallelism joins the positions of the ranks, did not "
                f"run as the last block. Where blocks are left out, set TensorParallel(..., sequence=False)."
            )

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is not self._first:
            self._again(module, args, kwargs)
            return None
        if self._zones.around is Zone.SEQUENCE and torch._C._current_graph_task_id() == -1:
            raise ModelError(
                f"{self._names[module]!r} runs where sequences are cut already: again before "
                f"{self._names[self._last]!r} has joined them, or inside of another stack of blocks. Set "
                f"TensorParallel(..., sequence=False)."
            )
        x = activation_in(args, kwargs, self._names[module])
        self._zones.enter_sequence(x.shape[SEQUENCE])
        own = CutRows.apply(x, self._ranks, SEQUENCE, self._names[module])  # type: ignore[no-untyped-call]
        self._returned.note(own, SEQUENCE, x.shape[SEQUENCE], f"input of {self._names[module]}")
        return with_activation(args, kwargs, own)

    def _again(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Enter a later block; one that is recomputed alone restores the positions of its forward.

        Raises:
            ModelError: the first block did not run. BatchError: positions are unknown, because the ranks do not divide
                them.
        """
        if torch._C._current_graph_task_id() == -1:
            if self._zones.around is not Zone.SEQUENCE:
                raise ModelError(
                    f"{self._names[module]!r} runs before {self._names[self._first]!r}, where sequence parallelism "
                    f"gives each rank its positions. Where blocks are left out, set TensorParallel(..., "
                    f"sequence=False)."
                )
            self._zones.enter_block()
            return
        own, (start, stop) = (
            activation_in(args, kwargs, self._names[module]).shape[SEQUENCE],
            self._ranks.rows(self._zones.positions),
        )
        positions = self._zones.positions if own == stop - start else own * self._ranks.size
        if self._zones.positions % self._ranks.size and positions != self._zones.positions:
            raise BatchError(
                f"{self._names[module]!r} is recomputed for a sequence of another length than the last, "
                f"{self._zones.positions} positions, which tensor_parallel={self._ranks.size} ranks do not divide. "
                f"Make the lengths multiples of {self._ranks.size}, or set sequence=False in TensorParallel."
            )
        self._zones.enter_sequence(positions)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        positions = self._zones.positions
        activation = output[0] if isinstance(output, (tuple, list)) and output else output
        listen(activation, lambda gradient: self._zones.recall(positions))
        label = f"output of {self._names[module]}"
        if module is not self._last:
            if isinstance(activation, Tensor):
                self._returned.note(activation, SEQUENCE, positions, label)
            self._zones.leave_block()
            return None
        self._zones.reset()
        if isinstance(output, Tensor):
            return JoinRows.apply(output, self._ranks, SEQUENCE, positions, label)  # type: ignore[no-untyped-call]
        if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
            joined = JoinRows.apply(output[0], self._ranks, SEQUENCE, positions, label)  # type: ignore[no-untyped-call]
            return type(output)([joined, *output[1:]]) if type(output) in (tuple, list) else (joined, *output[1:])
        raise ModelError(
            f"{self._names[module]!r} returns a {type(output).__name__}, and sequence parallelism needs a tensor, or a "
            f"tuple or list that begins with one. Set TensorParallel(..., sequence=False)."
        )


def open_attention(module: nn.Module, name: str, entrance: Entrance, zones: Zones) -> None:
    """Gather the rows of all ranks for a module in a block, under sequence parallelism."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if zones.around is not Zone.SEQUENCE:
            return None
        whole = entrance.open(activation_in(args, kwargs, name))
        zones.enter(Zone.WHOLE)
        return with_activation(args, kwargs, whole)

    module.register_forward_pre_hook(Hook(before), with_kwargs=True)


def activation_in(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
    """The activation among the arguments of a module: the first, or `hidden_states`.

    Raises:
        ModelError: there is none.
    """
    x = args[0] if args else kwargs.get(HIDDEN)
    if x is None:
        x = next((value for value in kwargs.values() if isinstance(value, Tensor) and value.dim() > 2), None)
    if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1:
        return x
    raise ModelError(
        f"{name!r} is called with no activation [..., T, D] as its first argument, which sequence parallelism needs. "
        f"Set TensorParallel(..., sequence=False)."
    )


def with_activation(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[Any, Any]:
    """The arguments with another activation."""
    if args:
        return (x, *args[1:]), kwargs
    name = HIDDEN if HIDDEN in kwargs else next(k for k, v in kwargs.items() if isinstance(v, Tensor) and v.dim() > 2)
    return args, {**kwargs, name: x}
