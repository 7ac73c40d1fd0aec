"""How far a backward has come in its graph.

[Note: numbers of nodes] Autograd numbers the nodes of a graph as the forward makes them, and of those that are ready it
runs the one with the highest number first; a node that accumulates a parameter's gradient comes before all others. So
when a node runs that is older than the forward of a unit, nothing of that forward is left to run, and all gradients are
there that it gives, whatever its parameters, its inputs and its place in the model. The nodes of a re-entrant backward
have numbers of their own, which say nothing about the graph around it.
"""

import torch

LATEST = 2**64 - 1  # the number of nodes that accumulate


def first_node() -> int:
    """The number of the first node of a forward that begins now in this thread.

    Without gradients it may be that of a re-entrant recomputation, whose node is the last that was made.
    """
    number: int = torch._C._autograd._get_sequence_nr()
    return number if torch.is_grad_enabled() else number - 1


class PlaceInGraph:
    """The place of one backward in its graph; made when it begins."""

    def __init__(self) -> None:
        self._task = torch._C._current_graph_task_id()
        self._node = LATEST

    @property
    def node(self) -> int:
        """The number of the node that runs; inside of a re-entrant backward, of the last seen of the one around it."""
        if torch._C._current_graph_task_id() == self._task:
            node = torch._C._current_autograd_node()
            if node is not None:
                self._node = node._sequence_nr()
        return self._node
