"""Marks of layers among the events of a step: forward and backward, recomputation, and no change of any value."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroshard.memory.ledger import Event
from zeroshard.train.layer_marks import LayerMarks


class Noting(torch.autograd.Function):
    """Adds an event in its forward and in its backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, events: list[Event], label: str) -> torch.Tensor:  # type: ignore[override, no-untyped-def]
        ctx.events, ctx.label = events, label
        events.append(Event(0.0, f"forward {label}", {}))
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override, no-untyped-def]
        ctx.events.append(Event(0.0, f"backward {ctx.label}", {}))
        return grad, None, None


class Block(nn.Module):
    def __init__(self, events: list[Event], label: str) -> None:
        super().__init__()
        self.linear, self.events, self.label = nn.Linear(4, 4), events, label

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted: torch.Tensor = Noting.apply(self.linear(x), self.events, self.label)
        return torch.tanh(noted)


class Net(nn.Module):
    def __init__(self, events: list[Event], again: bool = False) -> None:
        super().__init__()
        self.first, self.events, self.again = nn.Linear(4, 4), events, again
        self.blocks = nn.ModuleList(Block(events, str(n)) for n in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return Noting.apply(x, self.events, "head").sum()


def _step(marked: bool, again: bool = False) -> tuple[dict[str, tuple[str, str]], list[torch.Tensor]]:
    """The place of each event, and the gradients."""
    torch.manual_seed(0)
    events: list[Event] = []
    net = Net(events, again)
    marks = LayerMarks(events)
    if marked:
        with marks.on(net):
            net(torch.ones(2, 4)).backward()
        assert not any(block._forward_hooks or block._forward_pre_hooks for block in net.blocks)
    else:
        net(torch.ones(2, 4)).backward()
    places = {event.label: place for event, place in zip(events, marks.places(), strict=True)}
    return places, [p.grad for p in net.parameters() if p.grad is not None]


def test_events_lie_in_the_layers_that_run() -> None:
    places, _ = _step(marked=True)
    assert places == {
        "forward 0": ("forward", "blocks.0"),
        "forward 1": ("forward", "blocks.1"),
        "forward head": ("", ""),
        "backward head": ("", ""),
        "backward 1": ("backward", "blocks.1"),
        "backward 0": ("backward", "blocks.0"),
    }


def test_marks_change_no_gradient() -> None:
    for again in (False, True):
        (_, marked), (_, plain) = _step(marked=True, again=again), _step(marked=False, again=again)
        assert len(plain) == 6 and all(map(torch.equal, marked, plain))


def test_a_recomputed_forward_is_a_forward_of_its_layer() -> None:
    places, _ = _step(marked=True, again=True)
    assert places["forward 0"] == ("forward", "blocks.0") and places["backward 1"][1] in ("blocks.1", "")


def test_a_model_of_one_unit_has_no_marks() -> None:
    events = [Event(0.0, "start", {})]
    marks = LayerMarks(events)
    with marks.on(nn.Linear(2, 2)):
        assert marks.places() == [("", "")]
