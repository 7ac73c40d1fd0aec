"""Recomputation of a pipeline's chunks: a segment without slots, whose graph is made by the recomputation alone.

The forward of such a chunk runs without a graph. Its input is kept as that of a block; the executor restores it when
the chunk's backward is due.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from zeroshard.parts.part import Scratch
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.recompute.context import RecomputeContext
from zeroshard.recompute.kept_inputs import Hooks, KeptInput, keep_input
from zeroshard.recompute.segments import RecomputedForward, differs
from zeroshard.replay.generators import PYTHON_AND_NUMPY, ReachedGenerators, Source, held_by
from zeroshard.replay.replay import OTHER_VALUES, Replay, agrees, sample_of, spacing


class ChunkForward(RecomputedForward):
    """One microbatch's forward on a chunk; with `samples`, its output is compared with its recomputation's."""

    def __init__(self, name: str, replay: Replay, samples: bool) -> None:
        super().__init__(name, replay)
        self._samples, self._sample = samples, b""
        self._kept: KeptInput | None = None

    def ends(self, output: Tensor, kept: KeptInput | None) -> None:
        """End the forward; `kept` is its input, None at the start of the model."""
        self.end()
        self._kept, self._sample = kept, (self._samples and sample_of(output.detach())) or b""

    def compute(self, forward: Callable[[Tensor | None], Tensor]) -> None:
        """Run the forward again, from its input to its output; the input is a new leaf of autograd.

        Raises:
            PlanError: the output has other values.
        """
        kept, self._kept = self._kept, None
        output = self.run_again((), forward, kept and kept.tensor().requires_grad_(kept.requires_grad))
        if self._sample and not agrees(output.detach(), self._sample):
            raise differs(OTHER_VALUES, self.name)


class ChunkInputs:
    """Storage of the activations that enter a pipeline's chunks in training, and recomputation of chunks from them.

    Args:
        context: of the recomputation.
        modules: of the model, down to the innermost.
        hooks: of saved tensors, by which inputs are stored; None where they stay in the buffers of their messages.

    Attributes:
        recomputes: whether backwards compute the forward of their chunk again.
        moves: whether inputs leave the buffers of their messages.
        scratch: for messages with inputs; None where they lie among the others.
    """

    def __init__(
        self, context: RecomputeContext, modules: Sequence[nn.Module], hooks: Hooks | None, recomputes: bool
    ) -> None:
        self._context, self._modules, self._hooks = context, modules, hooks
        self.recomputes, self.moves = recomputes, hooks is not None
        self.scratch: Scratch | None = None if self.moves else context.arena
        self._reached, self._held = ReachedGenerators(modules), list[Source]()
        self._forwards = 0

    def begin(self, name: str) -> ChunkForward:
        """Begin a forward that will be computed again."""
        if self._reached.looks:
            self._reached.look()
            self._held = held_by(self._modules)
        sources = (*PYTHON_AND_NUMPY, *self._held, *self._reached.found)
        device = self._context.device
        compares = not self.moves and spacing(self._forwards, is_accelerator(device)) > 0  # else with loss, perhaps
        self._forwards += 1
        return ChunkForward(name, Replay(self._modules, device, self._context.ledger, sources=sources), compares)

    def keep(self, hidden: Tensor) -> KeptInput:
        """Keep an input until its backward."""
        if self._hooks is None:
            return KeptInput(hidden, None)
        partition = self._context.partition
        divided = partition is not None and partition.takes(hidden)
        if not divided:  # the buffer is free for the next message
            hidden = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        return keep_input(hidden, self._hooks, self._context)
