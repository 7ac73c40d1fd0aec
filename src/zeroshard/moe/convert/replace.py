"""Dense models into mixtures: feed-forward layers become experts that begin as copies (upcycling: 2212.05055).

[Note: The same function] Copies of one network, weighed by gates that add up to 1, are that network. Where gates do not
add up to 1, as the raw gate of Switch, experts' outputs are multiplied by 1 / E[sum of the gates], measured on normal
tokens with the router's initial weights; then the mixture begins close to the dense layer, not equal to it.

Granular experts (2410.07524, section 3.3): each copy is cut into G experts with F / G hidden features each, that have
one row of the router's weights in common, so that a token which chooses one of them chooses all G; k becomes k * G.

Partial reinitialisation (Drop-Upcycling, 2502.19261): each expert draws a share of its hidden features anew, with the
mean and the standard deviation that the weights of these features had.

Shapes: D width, F hidden features, E experts, k choices of a token.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import ModelError
from zeroshard.moe.convert.dense import DenseLayer, dense_layers, dense_weights
from zeroshard.moe.convert.inlined import as_modules
from zeroshard.moe.experts.experts import ExpertModules, Experts
from zeroshard.moe.layer import MoE
from zeroshard.moe.routing.presets import router_of
from zeroshard.planning.settings import check_number, check_whole
from zeroshard.units.materialise import seed_of

MakeRouter = Callable[[int, int], nn.Module]
TOKENS = 1024  # with which the sum of the gates is measured
EQUAL = 1e-4  # relative; gates add up to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Upcycling:
    """The initial weights of experts.

    Attributes:
        scale: factor on the experts' outputs; None for 1 / E[sum of a token's gates].
        noise: normal noise on every weight of experts, relative to the standard deviation of its matrix.
        reinitialise: the share of hidden features that each expert draws anew, from 0 to 1.
        granularity: G, the parts into which each copy is cut.
        seed: of the router's weights, the noise and the reinitialised features.
    """

    scale: float | None = None
    noise: float = 0.0
    reinitialise: float = 0.0
    granularity: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("granularity", self.granularity)
        if self.scale is not None:
            check_number("scale", self.scale)
        for name in ("noise", "reinitialise"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or value < 0 or (name == "reinitialise" and value > 1):
                most = " and at most 1" if name == "reinitialise" else ""
                raise ModelError(f"{name} is {value!r}; it must be a number of 0 or more{most}.")


@dataclass(frozen=True, slots=True)
class ReplacedLayer:
    """A feed-forward layer and its replacement.

    Attributes:
        path: of the module.
        kind: the class that was there.
        experts: of the mixture; 0 where the layer stayed as it was.
        parameters: before, and now.
        reason: how the experts compute and begin; or why the layer stayed.
    """

    path: str
    kind: str
    experts: int
    parameters: tuple[int, int]
    reason: str


@dataclass(frozen=True, slots=True)
class Replacement:
    """The replacements by `replace_ffn`; prints as a table.

    Attributes:
        layers: every feed-forward layer of the model, in its order.
    """

    layers: tuple[ReplacedLayer, ...]

    @property
    def replaced(self) -> tuple[str, ...]:
        """The paths of the mixtures."""
        return tuple(layer.path for layer in self.layers if layer.experts)

    def __str__(self) -> str:
        rows = [("layer", "was", "experts", "parameters", "")]
        for layer in self.layers:
            before, now = (f"{count:,}" for count in layer.parameters)
            size = f"{before} -> {now}" if layer.experts else before
            rows.append((layer.path, layer.kind, str(layer.experts or "-"), size, layer.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def replace_ffn(
    model: nn.Module,
    every: int = 2,
    experts: int = 8,
    router: str | MakeRouter = "gshard",
    k: int | None = None,
    capacity: float | None = None,
    upcycling: Upcycling | None = None,
) -> Replacement:
    """Replace every n-th feed-forward layer of a dense model by a mixture of experts, in place.

    Experts begin as copies of the layer. With a router whose gates add up to 1, the model computes in evaluation what
    it did before; see the note on the same function. A model on the meta device gets layers whose weights are drawn,
    once they are materialised.

    Args:
        every: n; in each list of blocks the n-th, the 2n-th and so on.
        experts: E of each mixture, before they are cut into granular ones.
        router: the name of a preset; or a function that makes a router from D and E.
        k: choices of a token; None for the preset's own.
        capacity: the capacity factor; None for the preset's own.
        upcycling: how experts begin; copies by default.

    Raises:
        ModelError: no layer can be replaced, or the settings do not fit the layers.
    """
    check_whole("every", every)
    check_whole("experts", experts)
    if not isinstance(router, str) and (k is not None or capacity is not None):
        raise ModelError("k and capacity belong to routers that are named. Give them to the router that you make.")
    with as_modules(model):
        return _replaced(model, every, experts, partial(_router, router, k, capacity), upcycling or Upcycling())


def _replaced(
    model: nn.Module, every: int, experts: int, routers: Callable[[int], MakeRouter], how: Upcycling
) -> Replacement:
    """As `replace_ffn`, for layers that are modules.

    Args:
        routers: what makes a router, by the parts of each copy.
    """
    rows, made = [], dict[int, MoE]()
    counted = list(_numbered(model, list(dense_layers(model))))
    for layer, number in counted:
        module = model.get_submodule(layer.path)
        reason = layer.refused or _skipped(layer.path, number, every)
        if not reason:
            made[id(module)], reason = _Where(layer, module, how).mixture(routers(how.granularity), experts)
        sizes = [sum(p.numel() for p in each.parameters()) for each in (module, made.get(id(module), module))]
        count = made[id(module)].experts.experts if id(module) in made else 0
        rows.append(ReplacedLayer(layer.path, type(module).__name__, count, (sizes[0], sizes[1]), reason))
    table = Replacement(tuple(rows))
    if not made:
        listed = f"\n{table}" if rows else " It has no feed-forward layers of two or three linear layers in a module."
        none = f"No feed-forward layer of {type(model).__name__} can be replaced."
        raise ModelError(f"{none}{_way_out(counted, every)}{listed}")
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in made:
                module._modules[name] = made[id(child)]
    return table


def _way_out(counted: Sequence[tuple[DenseLayer, int | None]], every: int) -> str:
    """The advice for a setting that replaces no layer."""
    numbers = [number or 1 for layer, number in counted if layer.path and not layer.refused]
    if not numbers or every <= max(numbers):
        return " Leave the mixtures out, or put zs.moe.MoE into the model."
    return f" every={every} is more than the {max(numbers)} of a list; set every to {max(numbers)} or less."


def _numbered(model: nn.Module, layers: Sequence[DenseLayer]) -> Iterator[tuple[DenseLayer, int | None]]:
    """Each layer with its number, from 1, among the blocks of its list that have one; None outside of lists.

    Its list is the outermost one with two such blocks, or with one if there is no other.
    """
    modules, blocks = dict(model.named_modules()), defaultdict[str, dict[str, int]](dict)
    for layer in layers:
        for path, block in _lists_around(modules, layer.path):
            blocks[path].setdefault(block, len(blocks[path]) + 1)
    for layer in layers:
        around = list(_lists_around(modules, layer.path))
        several = [(path, block) for path, block in around if len(blocks[path]) > 1] or around
        yield layer, blocks[several[0][0]][several[0][1]] if several else None


def _lists_around(modules: Mapping[str, nn.Module], path: str) -> Iterator[tuple[str, str]]:
    """The lists of modules around a path, the outermost first, with the name of the block in them."""
    parts = path.split(".") if path else []
    for length, block in enumerate(parts):
        around = ".".join(parts[:length])
        if isinstance(modules[around], (nn.ModuleList, nn.Sequential)):
            yield around, block


def _skipped(path: str, number: int | None, every: int) -> str:
    """Why a layer is not replaced, by its number; "" if it is."""
    if not path:
        return "it is the model itself"
    if number is None:
        return "" if every == 1 else f"it is in no list of blocks, whose number {every} could be replaced"
    return "" if number % every == 0 else f"number {number} of its list, and every {every} are replaced"


def _router(router: str | MakeRouter, k: int | None, capacity: float | None, parts: int) -> MakeRouter:
    return _Named(router, k, capacity, parts) if isinstance(router, str) else router


@dataclass(frozen=True, slots=True)
class _Named:
    """Makes routers of a preset; for granular experts such that a token chooses all parts of a copy."""

    name: str
    k: int | None
    capacity: float | None
    parts: int

    def __call__(self, width: int, experts: int) -> nn.Module:
        given: dict[str, Any] = {} if self.capacity is None else {"capacity": self.capacity}
        if self.parts == 1:
            return router_of(self.name, width, experts, k=self.k, **given)
        of_copies = router_of(self.name, width, experts // self.parts, k=self.k)
        gating = getattr(of_copies, "gating", None)
        if gating is None:
            raise ModelError(f"granularity={self.parts} needs a router of one level, and {self.name!r} has more.")
        router = router_of(self.name, width, experts, k=gating.choices * self.parts, **given)
        with torch.no_grad():
            router.weight.copy_(of_copies.weight.repeat_interleave(self.parts, 0))
        return router


@dataclass(frozen=True, slots=True)
class _Where:
    """A feed-forward layer to replace."""

    layer: DenseLayer
    module: nn.Module
    how: Upcycling

    def mixture(self, make: MakeRouter, experts: int) -> tuple[MoE, str]:
        """The mixture, and how it computes and begins."""
        first, parts = next(self.module.parameters()), self.how.granularity
        meta = first.device.type == "meta"
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed_of(self.how.seed, self.layer.path, "router"))
            router = make(self.layer.width, experts * parts)
            total, constant = _sums_of_gates(router, self.layer.width)
        with torch.no_grad():
            for parameter in router.parameters():
                parameter.data = parameter.data.to(first.dtype)
        scale = self.how.scale or (1.0 if abs(total - 1) < EQUAL else 1 / total)
        if self.layer.feed_forward is None:
            made = self._of_modules(router.to(first.device), experts, scale)
        else:
            made = self._stacked(router.to(first.device), experts, scale)
        for parameter in made.experts.parameters():
            parameter.requires_grad_(first.requires_grad)
        begin = "experts are drawn when they are materialised" if meta else self._begin(scale, total, constant)
        return made.train(self.module.training), f"{self._kind()}; {begin}"

    def _kind(self) -> str:
        found = self.layer.feed_forward
        if found is None:
            return f"experts are modules, as {self.layer.reason}"
        return f"stacked experts, {'gated ' if found.gated else ''}{found.activation}"

    def _begin(self, scale: float, total: float, constant: bool) -> str:
        """The initial weights of experts, as text."""
        how, words = self.how, []
        if how.granularity > 1:
            words.append(f"each copy in {how.granularity} parts")
        if scale != 1:
            words.append(f"outputs times {scale:.3g}")
        if how.noise:
            words.append(f"noise of {how.noise:g}")
        if how.reinitialise:
            words.append(f"{how.reinitialise:.0%} of hidden features anew")
        if how.noise or how.reinitialise or abs(total * scale - 1) > EQUAL:
            same = "another function"
        else:
            same = "the same function in evaluation" if constant else "the same function in the mean over tokens"
        return ", ".join(["copies", *words, same])

    def _of_modules(self, router: nn.Module, experts: int, scale: float) -> MoE:
        """Copies of the module itself.

        Raises:
            ModelError: a setting that needs stacked experts.
        """
        if self.how.granularity > 1 or self.how.reinitialise:
            raise ModelError(
                f"granularity and reinitialise need to know the hidden features of {self.layer.path!r}, and "
                f"{self.layer.reason}. Leave them out, or use noise."
            )
        first, make = next(self.module.parameters()), partial(copy.deepcopy, self.module)
        made = MoE(self.layer.width, self.layer.hidden, experts, router=router, expert=make)
        assert isinstance(made.experts, ExpertModules)
        made.experts.statistics.to(first.device)
        down = f"{self.layer.down}."
        for number, expert in enumerate(made.experts.networks):
            weights = {name: p for name, p in expert.named_parameters() if p.device.type != "meta"}
            for name, parameter in weights.items():
                drawn = _Drawn(self.how, self.layer.path, number, name)
                changed = drawn.noisy(parameter.detach())
                parameter.data.copy_(changed * scale if name.startswith(down) else changed)
        return made

    def _stacked(self, router: nn.Module, experts: int, scale: float) -> MoE:
        """Copies of the weights in stacked parameters.

        Raises:
            ModelError: the hidden features cannot be cut into so many parts.
        """
        parts, first = self.how.granularity, next(self.module.parameters())
        if self.layer.hidden % parts:
            raise ModelError(
                f"granularity={parts} does not divide the {self.layer.hidden} hidden features of {self.layer.path!r}. "
                f"Set it to a divisor."
            )
        with torch.device("meta"):
            hidden = self.layer.hidden // parts
            made = MoE(self.layer.width, hidden, experts * parts, router=router, expert=self.layer.feed_forward)
        assert isinstance(made.experts, Experts)
        for parameter in made.experts.parameters():
            parameter.data = parameter.data.to(first.dtype)
        if first.device.type == "meta":
            return made
        made.experts.to_empty(device=first.device)
        made.experts.statistics.clear()
        weights = dense_weights(self.layer, self.module)
        stacks = {name: p.data.unflatten(0, (experts, parts)) for name, p in made.experts.named_parameters()}
        for number in range(experts):
            for name, values in self._changed(weights, number).items():
                scaled = values * (scale if name == "down_bias" else scale * parts) if "down" in name else values
                for part, piece in enumerate(self._pieces(name, scaled)):
                    stacks[name][number, part].copy_(piece)
        return made

    def _pieces(self, name: str, values: Tensor) -> Sequence[Tensor]:
        """The weights of the parts of a copy; the bias of its output is the same in each, as their gates share it."""
        parts, gated = self.how.granularity, self.layer.feed_forward is not None and self.layer.feed_forward.gated
        if name == "down_bias":
            return [values] * parts
        if name == "down":
            return values.chunk(parts, 1)
        halves = [half.chunk(parts) for half in (values.chunk(2) if gated else (values,))]
        return [torch.cat(pieces) for pieces in zip(*halves, strict=True)]

    def _changed(self, weights: Mapping[str, Tensor], number: int) -> Mapping[str, Tensor]:
        """The weights of one copy, partly drawn anew."""
        if not (self.how.noise or self.how.reinitialise):
            return weights
        chosen = _Drawn(self.how, self.layer.path, number, "features").features(self.layer.hidden)
        gated = self.layer.feed_forward is not None and self.layer.feed_forward.gated
        changed = {}
        for name, values in weights.items():
            drawn = _Drawn(self.how, self.layer.path, number, name)
            values = values.clone()
            if len(chosen) and name == "down":
                values[:, chosen] = drawn.like(values[:, chosen])
            elif len(chosen) and name != "down_bias":
                for half in values.chunk(2) if gated else (values,):
                    half[chosen] = drawn.like(half[chosen])
            changed[name] = drawn.noisy(values)
        return changed


class _Drawn:
    """Random numbers of one weight of one expert."""

    def __init__(self, how: Upcycling, path: str, expert: int, name: str) -> None:
        self._how = how
        self._generator = torch.Generator().manual_seed(seed_of(how.seed, path, expert, name))

    def features(self, hidden: int) -> Tensor:
        """The hidden features that are drawn anew."""
        count = int(self._how.reinitialise * hidden)
        return torch.randperm(hidden, generator=self._generator, device="cpu")[:count]

    def like(self, values: Tensor) -> Tensor:
        """Normal numbers of the same mean and standard deviation."""
        return values.float().mean() + values.float().std() * self._normal(values)

    def noisy(self, values: Tensor) -> Tensor:
        """The values with noise."""
        if not self._how.noise or values.numel() < 2:
            return values
        return (values + self._how.noise * values.float().std() * self._normal(values)).to(values.dtype)

    def _normal(self, values: Tensor) -> Tensor:
        made = torch.randn(values.shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return made.to(values.device)


@torch.no_grad()
def _sums_of_gates(router: nn.Module, width: int) -> tuple[float, bool]:
    """The mean over normal tokens of the sum of their gates, in evaluation, and whether it is the same for all."""
    training = router.training
    tokens = torch.randn(TOKENS, width)
    try:
        routing = router.eval()(tokens)
    finally:
        router.train(training)
    sums = (routing.gates if routing.kept is None else routing.gates * routing.kept).sum(-1)
    mean = float(sums.mean())
    return mean, float((sums - mean).abs().max()) <= EQUAL * mean
