"""The layer: a router, experts, and a shared expert. It stands where a feed-forward layer stood."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.errors import ModelError
from zeroshard.moe.experts.activations import activation_of
from zeroshard.moe.experts.experts import ExpertModules, Experts
from zeroshard.moe.routing.presets import router_of
from zeroshard.moe.routing.selection import Capacity
from zeroshard.step.losses import penalised

Mix = Literal["sum", "sigmoid", "softmax"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """The architecture of one expert.

    Attributes:
        activation: "relu", "relu_squared", "gelu", "gelu_tanh" or "silu".
        gated: activation(gate) * value, as in SwiGLU.
        bias: whether both products have one.
        dropout: of hidden features, in training (2101.03961, section 2.4: 0.4, in fine-tuning).
        scale: of initial weights, as in `Experts`; None for those of `nn.Linear`.
    """

    activation: str = "relu"
    gated: bool = False
    bias: bool = False
    dropout: float = 0.0
    scale: float | None = None


SWIGLU = FeedForward(activation="silu", gated=True)


class FeedForwardLayer(nn.Module):
    """One feed-forward network, as `feed_forward` says: the expert of every token.

    Args:
        width: D.
        hidden: F.
    """

    def __init__(self, width: int, hidden: int, feed_forward: FeedForward | None = None) -> None:
        super().__init__()
        kind = feed_forward or FeedForward()
        self.activation, self.dropout = activation_of(kind.activation, kind.gated), kind.dropout
        self.up = nn.Linear(width, 2 * hidden if kind.gated else hidden, bias=kind.bias)
        self.down = nn.Linear(hidden, width, bias=kind.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        hidden = self.activation(self.up(x))
        output: Tensor = self.down(F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden)
        return output


class SharedExpert(nn.Module):
    """A network that every token passes, and how its output joins that of the chosen experts.

    Args:
        network: from [T, D] to [T, D].
        width: D; needed for "sigmoid" and "softmax".
        mix: "sum" (DeepSeek: 2401.06066); "sigmoid", the network's output times a gate of the token (Qwen2-MoE);
            "softmax", both outputs times gates that add up to 1 (the residual experts of PR-MoE: 2201.05596).
    """

    def __init__(self, network: nn.Module, width: int | None = None, mix: Mix = "sum") -> None:
        super().__init__()
        gates = {"sum": 0, "sigmoid": 1, "softmax": 2}
        if mix not in gates:
            raise ModelError(f"SharedExpert has no mix {mix!r}; there are 'sum', 'sigmoid' and 'softmax'.")
        if gates[mix] and width is None:
            raise ModelError(f"SharedExpert(mix={mix!r}) makes gates of tokens, and needs their width: width=D.")
        self.network, self.mix = network, mix
        self.gate = nn.Linear(width, gates[mix], bias=mix == "softmax") if width is not None and gates[mix] else None

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The output [T, D] of the layer, from its input [T, D] and the output [T, D] of the chosen experts."""
        own: Tensor = self.network(x)
        if self.gate is None:
            return mixed + own
        gates: Tensor = self.gate(x)
        if self.mix == "sigmoid":
            return mixed + gates.sigmoid() * own
        of_mixed, of_own = gates.softmax(-1).unbind(-1)
        return mixed * of_mixed.unsqueeze(-1) + own * of_own.unsqueeze(-1)


class MoE(nn.Module):
    """A mixture of experts in the place of a feed-forward layer (1701.06538).

    Args:
        width: D.
        hidden: hidden features of each expert.
        experts: E, of all ranks.
        router: the name of a preset, or a module from tokens [T, D] to a `Routing`.
        k: choices of a token; None for the preset's own.
        capacity: the capacity factor in training, or all its settings; math.inf for none, None for the preset's own.
        expert: what an expert is; or a function that makes one, a module from [r, D] to [r, D].
        shared: how many experts' hidden features every token passes besides, in one network; or that network.

    Raises:
        ModelError: k or capacity beside a router of your own.
    """

    adds_penalty = True

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        router: str | nn.Module = "switch",
        k: int | None = None,
        capacity: float | Capacity | None = None,
        expert: FeedForward | Callable[[], nn.Module] | None = None,
        shared: int | nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not _uncompiled:
            _uncompiled["mixed"] = torch.compiler.disable(_mixed)
        self.width = width
        self.router = _router(router, width, experts, k, capacity)
        feed_forward = expert if isinstance(expert, FeedForward) else FeedForward()
        self.experts: Experts | ExpertModules
        if expert is None or isinstance(expert, FeedForward):
            self.experts = Experts(width, hidden, experts, **asdict(feed_forward))
        else:
            self.experts = ExpertModules(expert, experts)
        if isinstance(shared, int) and shared:
            shared = FeedForwardLayer(width, shared * hidden, feed_forward)
        if isinstance(shared, nn.Module) and not isinstance(shared, SharedExpert):
            shared = SharedExpert(shared)
        self.shared = shared or None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """[..., D] -> [..., D]; in training, its backward adds the gradient of the router's balance losses.

        Args:
            valid: [...], bool: tokens that are no padding; None where all are.
        """
        return _uncompiled.get("mixed", _mixed)(self, x, valid)


def _mixed(layer: MoE, x: Tensor, valid: Tensor | None) -> Tensor:
    """The forward of a layer."""
    tokens = x.reshape(-1, layer.width)
    mask = None if valid is None else valid.reshape(-1)
    routing = layer.router(tokens, mask, x.shape[-2] if x.dim() > 2 else None)
    penalty, weighed = routing.penalty, routing
    if layer.training and penalty is not None and penalty.requires_grad:
        weighed = replace(routing, gates=penalised(routing.gates, penalty))  # the output may be written over in place
    with layer.experts.statistics.watching(routing):
        output: Tensor = layer.experts(tokens, weighed)
    if layer.shared is not None:
        output = layer.shared(tokens, output)
    return output.view(x.shape)


# By name, once there is a layer: functions that torch.compile leaves out of its graphs. A graph would make the weight
# of penalties a constant, or lose them, and sizes of messages come from values. The import of the compiler takes long.
_uncompiled: dict[str, Callable[..., Tensor]] = {}


def _router(
    router: str | nn.Module, width: int, experts: int, k: int | None, capacity: float | Capacity | None
) -> nn.Module:
    given: dict[str, Any] = {name: value for name, value in (("k", k), ("capacity", capacity)) if value is not None}
    if isinstance(router, str):
        return router_of(router, width, experts, **given)
    if given:
        names = " and ".join(given)
        raise ModelError(f"MoE was given {names} beside a router of your own. Give {names} to the router.")
    return router
