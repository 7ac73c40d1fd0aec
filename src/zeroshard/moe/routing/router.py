"""The router of a mixture: from tokens to the record of their routing."""

import math
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.errors import BatchError, PlanError
from zeroshard.moe.routing.balance import (
    Sum,
    balance_loss,
    chances,
    importance,
    mean_entropy,
    squared_variation,
    z_loss,
)
from zeroshard.moe.routing.gating import Gating
from zeroshard.moe.routing.record import Routing, TokenGroups
from zeroshard.moe.routing.selection import ExpertChoice, GroupLimited, largest, serving_order, with_place
from zeroshard.planning.settings import check_whole
from zeroshard.precision.cast import FP32, RETURNS_FP32


class Router(nn.Module):
    """Chooses k of E experts for each token, as its `Gating` says.

    Noise, capacity and losses belong to training; evaluation is deterministic and, by default, without a limit. Under a
    plan of 16-bit precision the weights stay in fp32 too (Switch, section 2.4: selective precision).

    Attributes:
        width: the features of a token.
        experts: E.
        gating: the settings.
        weight: [E, width].
        noise_weight: [E, width], of learned noise; None without it.
        bias: [E], fp32, a buffer: what is added to scores where experts are chosen, and nowhere else; None without it.
        summed: takes the counts [E], int64, of one forward in training and returns those of the global batch, for
            losses of scope "global"; None for those of the forward alone. It is called in every forward in training, on
            every rank in the same order.

    Raises:
        PlanError: settings that do not fit the number of experts.
    """

    def __init__(self, width: int, experts: int, gating: Gating, **options: Any) -> None:
        """See the class.

        Args:
            options: device and dtype of the weights.
        """
        super().__init__()
        check_whole("width", width)
        check_whole("experts", experts)
        if gating.choices > experts:
            raise PlanError(
                f"{gating.choices} experts of a token are more than the {experts} there are; "
                f"use k of at most {experts}, or more experts."
            )
        if isinstance(gating.selection, GroupLimited):
            gating.selection.check(experts, gating.choices)
        elif isinstance(gating.selection, ExpertChoice) and gating.selection.causal:
            warnings.warn(
                "Experts that choose tokens compare each token with later ones, so in a causal model routing leaks the "
                "future. Where the model is not causal, say so by ExpertChoice(causal=False).",
                stacklevel=2,
            )
        self.width, self.experts, self.gating = width, experts, gating
        setattr(self, FP32, gating.dtype == torch.float32)
        setattr(self, RETURNS_FP32, True)  # gates and losses are at least that, whatever computes them
        self.weight = nn.Parameter(torch.empty(experts, width, **options))
        self.noise_weight = nn.Parameter(torch.empty(experts, width, **options)) if gating.learned_noise else None
        bias = torch.zeros(experts, device=options.get("device")) if gating.bias_step else None
        self.bias: Tensor | None
        self.register_buffer("bias", bias)
        self.summed: Sum | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew; weights of noise and biases are zero."""
        with torch.no_grad():
            if self.gating.init == "truncated":
                _truncated_normal(self.weight, math.sqrt(self.gating.init_scale / self.width))
            elif self.gating.init == "normal":
                nn.init.normal_(self.weight, std=self.gating.init_scale)
            else:
                nn.init.zeros_(self.weight)
            for zeros in (self.noise_weight, self.bias):
                if zeros is not None:
                    zeros.zero_()

    def forward(self, x: Tensor, valid: Tensor | None = None, group: int | None = None) -> Routing:
        """The routing of tokens x [T, width].

        Args:
            x: not changed.
            valid: [T], bool: False for padding, which chooses nothing and counts nowhere; None where there is none.
            group: the tokens of a sequence, for settings with group="sequence".

        Raises:
            BatchError: shapes other than these.
        """
        groups = self._groups(x, valid, group)
        noise = self.gating.noise if self.training else None
        source = x if noise is None else noise.on_input(self._cast(x))
        clean = self._product(source, self.weight)
        scale = None
        if noise is not None and self.noise_weight is not None:
            scale = F.softplus(self._product(source, self.noise_weight)) + noise.size
        logits = clean if noise is None else noise.on_logits(clean, scale)
        scores = logits.softmax(-1) if self.gating.score == "softmax" else logits.sigmoid()
        experts, chosen = self._choose(logits, scores, groups)
        raw = scores.gather(-1, experts)
        gates, kept = self._placed(raw, experts, chosen, groups)
        probabilities = scores if self.gating.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        losses: dict[str, Tensor] = {}
        if self.training:
            losses = self._losses(probabilities, experts, gates, logits, groups)
            if self.gating.losses.load and scale is not None:
                load = groups.whole().sums(chances(clean, logits, scale, self.gating.choices)).squeeze(0)
                losses["load"] = self.gating.losses.load * squared_variation(load)
        counts = groups.whole().counts(experts, self.experts, chosen).squeeze(0)
        return Routing(experts, gates * self.gating.scale, kept, counts, losses, mean_entropy(probabilities, groups))

    @property
    def sums_counts(self) -> bool:
        """Whether its losses are over the global batch, for which `summed` is asked."""
        return self.gating.losses.scope == "global"

    @torch.no_grad()
    def update_bias(self, counts: Tensor) -> None:
        """Move each bias by u towards the even load: b_e += u·sign(mean(n) - n_e) (2408.15664, algorithm 1).

        Args:
            counts: [E], the choices of a whole step, of all microbatches and data ranks.
        """
        if self.bias is not None:
            load = counts.to(self.bias)
            self.bias += self.gating.bias_step * torch.sign(load.mean() - load)

    def extra_repr(self) -> str:
        """The sizes and settings, for `repr`."""
        return f"{self.width}, {self.experts}, {self.gating}"

    def _groups(self, x: Tensor, valid: Tensor | None, sequence: int | None) -> TokenGroups:
        if x.dim() != 2 or x.shape[-1] != self.width:
            raise BatchError(
                f"A router of width {self.width} got a tensor of shape {list(x.shape)}; it needs "
                f"[tokens, {self.width}]. Flatten batch and sequence into tokens first."
            )
        if valid is not None and (valid.dtype != torch.bool or valid.shape != x.shape[:1]):
            raise BatchError(
                f"valid is {list(valid.shape)} of {valid.dtype}; it must be [{len(x)}] of torch.bool, True for tokens "
                "and False for padding, such as attention_mask.bool().flatten()."
            )
        size = sequence if self.gating.group == "sequence" else self.gating.group
        return TokenGroups(len(x), max(1, len(x) if size is None else int(size)), valid)

    def _cast(self, x: Tensor) -> Tensor:
        """In the dtype of products."""
        dtype = self.gating.dtype
        return x if dtype is None else x.to(torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), dtype))

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x·weightᵀ, in fp32 or in the dtype of the settings, also under autocast; the result in fp32 at least."""
        if self.gating.dtype is None:
            product = F.linear(x, weight)
        else:
            known = torch.amp.is_autocast_available(x.device.type)  # not of the meta device
            with torch.autocast(x.device.type, enabled=False) if known else nullcontext():
                product = F.linear(self._cast(x), self._cast(weight))
        return product.to(torch.promote_types(product.dtype, torch.float32))

    @torch.no_grad()
    def _choose(self, logits: Tensor, scores: Tensor, groups: TokenGroups) -> tuple[Tensor, Tensor | None]:
        """The experts [T, k], and which of them are chosen at all; None for all."""
        selection, noise = self.gating.selection, self.gating.noise
        if isinstance(selection, ExpertChoice):
            return selection.choose(scores, self.gating.choices, groups)
        if noise is not None and noise.kind == "gumbel" and self.training:
            return noise.sampled_second(logits), None
        biased = scores if self.bias is None else scores + self.bias
        if isinstance(selection, GroupLimited):
            biased = selection.allowed(biased)
        return largest(biased, self.gating.choices), None

    def _placed(
        self, raw: Tensor, experts: Tensor, chosen: Tensor | None, groups: TokenGroups
    ) -> tuple[Tensor, Tensor | None]:
        """The gates of scores `raw` [T, k], and which choices are kept."""
        gating = self.gating
        gates = _normalised(raw) if gating.normalise == "before" else raw
        used = chosen
        if gating.second is not None:
            used = gating.second.used(gates, self.training)
        if groups.valid is not None:
            valid = groups.valid.unsqueeze(-1).expand_as(gates)
            used = valid if used is None else used & valid
        kept = used
        if gating.capacity is not None:
            limits = [gating.capacity.limit(s, self.experts, gating.choices, self.training) for s in groups.sizes]
            places = [limit for limit in limits if limit is not None]
            if places:
                takes = groups.valid.unsqueeze(-1).expand_as(gates) if groups.valid is not None else None
                if gating.second is not None and not gating.second.holds_place:
                    takes = used
                priority = gating.priority if self.training or gating.priority != "random" else "position"
                placed = with_place(experts, places, groups, serving_order(priority, gates, raw), takes)
                kept = placed if used is None else placed & used
        if gating.normalise == "after":
            gates = _normalised(gates if kept is None else torch.where(kept, gates, 0.0))
        return gates, kept

    def _losses(
        self, probabilities: Tensor, experts: Tensor, gates: Tensor, logits: Tensor, groups: TokenGroups
    ) -> dict[str, Tensor]:
        """The weighted losses that have a weight, but for the load."""
        weights, found = self.gating.losses, {}
        if weights.balance:
            counted = experts[:, :1] if weights.counted == "first" else experts
            if weights.counted == "scores":
                counted = largest(logits, self.gating.choices)
            among = groups if weights.scope == "group" else groups.whole()
            summed = self.summed if weights.scope == "global" else None
            found["balance"] = weights.balance * balance_loss(probabilities, counted, among, summed)
        if weights.z:
            found["z"] = weights.z * z_loss(logits, groups)
        if weights.importance:
            found["importance"] = weights.importance * squared_variation(
                importance(gates, experts, self.experts, groups)
            )
        return found


def _normalised(gates: Tensor) -> Tensor:
    """Gates over their sum for each token; zeros stay zeros."""
    total = gates.sum(-1, keepdim=True)
    return gates / torch.where(total > 0, total, 1.0)


def _truncated_normal(weight: Tensor, std: float) -> None:
    """Fill with a normal distribution cut off at two deviations, by its inverse: in law that of drawing again beyond.

    `nn.init.trunc_normal_` draws again as often as values say, which meta and fake tensors cannot tell.
    """
    edge = math.erf(math.sqrt(2))
    weight.uniform_(-edge, edge).erfinv_().mul_(math.sqrt(2) * std).clamp_(-2 * std, 2 * std)
