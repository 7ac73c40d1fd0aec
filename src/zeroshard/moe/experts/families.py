"""Modules of experts in a model, of this package or of others: their number, parameters and computation.

Found are the experts of `zeroshard.moe`, and modules of other packages by their structure: parameters that are all
stacked [E, ...], or lists of alike modules, with a forward that takes tokens, the chosen experts and their weights, as
those of transformers do. Their classes and the names of their parameters stay as they are; `FoundExperts.install` puts
another forward in the place of their own, which gets a `Routing`.

Shapes: T tokens, k choices of each, R rows, D features, E experts.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.moe.experts.activations import ACTIVATIONS, Activation, Function, Gated, Traced
from zeroshard.moe.experts.experts import compute_modules, stacked_rows, weighed, with_gradients
from zeroshard.moe.experts.kernels import ExpertStack
from zeroshard.moe.routing.record import Routing
from zeroshard.moe.routing.statistics import Statistics
from zeroshard.parts.technique import ROWS_OF_OTHERS
from zeroshard.tensor.find.trial import apart
from zeroshard.units.forwards import insert

Forward = Callable[[Tensor, Routing], Tensor]
Compute = Callable[[Tensor, Sequence[int], Tensor | None], Tensor]
CHOSEN = {"top_k_index", "router_indices", "selected_experts", "topk_indices", "expert_indices", "top_k_indices"}
WEIGHTS = {"top_k_weights", "routing_weights", "topk_weights", "expert_weights", "router_weights"}
FLAGS = ("has_gate", "has_bias", "is_transposed")  # of transformers' interface of experts
DOWN = "down_proj"
COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "n_experts",
)  # by their usual names
NUMBER = "num_experts"  # the attribute by which experts of other packages know how many they hold


@dataclass(frozen=True, slots=True)
class FoundExperts:
    """The experts of one mixture.

    Attributes:
        path: of the module in the model.
        module: it.
        experts: E, of all ranks.
        stacked: names of the module's own parameters, all [E, ...]; none where experts are modules.
        modules: one for each expert; none where their parameters are stacked.
        compute: rows [R, D] -> [R, D], sorted by expert, from the rows, their counts and their gates [R] (None for 1).
            Counts are those of the experts that stacked parameters hold; of all experts where these are modules.
    """

    path: str
    module: nn.Module
    experts: int
    stacked: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    compute: Compute

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of all experts."""
        stacked = [self.module.get_parameter(name) for name in self.stacked]
        return [*stacked, *(parameter for module in self.modules for parameter in module.parameters())]

    def install(self, forward: Forward) -> None:
        """Put a forward of tokens [T, D] and their routing in the place of the module's own; it may exchange rows."""
        for each in self.modules:
            setattr(each, ROWS_OF_OTHERS, True)
        made = RoutedForward(self.module, self.experts, forward) if _takes_choices(self.module) else forward
        insert(self.module, "exchanged", lambda _: made)

    def count(self) -> Statistics:
        """The statistics of its routings. To experts of other packages they are added; a routed forward counts."""
        if not hasattr(self.module, "statistics"):
            self.module.add_module("statistics", Statistics(self.experts))
        found: Statistics = self.module.statistics  # type: ignore[assignment]
        return found


def find_experts(model: nn.Module) -> tuple[FoundExperts, ...]:
    """The experts of all mixtures of a model, in the order of its modules; it reads shapes only."""
    found: list[FoundExperts] = []
    for path, module in model.named_modules():
        if not any(path.startswith(f"{each.path}.") for each in found):
            experts = _own_experts(path, module) or _stacked_experts(path, module) or _listed_experts(path, module)
            found += [experts] if experts is not None else []
    return tuple(found)


def unknown_mixtures(model: nn.Module) -> list[str]:
    """Paths and classes of modules that are experts by the names of their classes, or have a number of experts.

    Of modules inside each other the innermost with parameters count, and of those of one class the first.
    """
    for is_one in (_is_named_so, _counts_some):
        found: dict[type[nn.Module], str] = {}
        for path, module in model.named_modules():
            inside = [each for each in module.modules() if is_one(each) and next(each.parameters(), None) is not None]
            if inside == [module]:
                found.setdefault(type(module), f"{path!r} ({type(module).__name__})")
        if found:
            return list(found.values())
    return []


def _is_named_so(module: nn.Module) -> bool:
    return "expert" in type(module).__name__.lower()


def _counts_some(module: nn.Module) -> bool:
    return any(isinstance(count := getattr(module, name, 0), int) and count > 1 for name in COUNTS)


def _own_experts(path: str, module: Any) -> FoundExperts | None:
    """Experts as those of `zeroshard.moe`: `experts`, a number, and `compute`."""
    if not isinstance(getattr(module, "experts", None), int) or not callable(getattr(module, "compute", None)):
        return None
    lists = [
        child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child) == module.experts
    ]  # fmt: skip
    names = tuple(name for name, parameter in module.named_parameters(recurse=False) if parameter.dim())
    return FoundExperts(path, module, module.experts, names, tuple(lists[0]) if lists else (), module.compute)


def _stacked_experts(path: str, module: Any) -> FoundExperts | None:
    parameters = dict(module.named_parameters(recurse=False))
    number = getattr(module, NUMBER, None)
    known = isinstance(number, int) and all(p.dim() > 1 and len(p) == number for p in parameters.values())
    inside = sum(1 for _ in module.parameters())
    if not known or not parameters or inside > len(parameters) or not _takes_choices(module):
        return None
    assert isinstance(number, int)
    activation = _activation(module, set(parameters))
    compute = partial(_compute_by_forward, module)
    if activation is not None:
        compute = partial(_compute_by_kernels, module, activation)
    return FoundExperts(path, module, number, tuple(parameters), (), compute)


def _listed_experts(path: str, module: nn.Module) -> FoundExperts | None:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not _takes_choices(module):
        return None
    networks = tuple(child for child in module.children() if not isinstance(child, Statistics))
    if not networks or len({type(network) for network in networks}) > 1 or list(module.parameters(recurse=False)):
        return None
    compute = partial(compute_modules, networks, idle_gradients=False)  # their own forward does not call them then
    return FoundExperts(path, module, len(networks), (), networks, compute)


def _takes_choices(module: nn.Module) -> bool:
    """Whether the forward of a class takes tokens, the experts chosen for them, and the weights of these."""
    names = list(inspect.signature(type(module).forward).parameters)[1:4]
    return len(names) == 3 and names[1] in CHOSEN and names[2] in WEIGHTS


def _activation(module: Any, names: set[str]) -> Activation | None:
    """The activation of experts with transformers' interface; None for other modules."""
    if not all(isinstance(vars(module).get(flag), bool) for flag in FLAGS) or vars(module).get("has_post_expert_norm"):
        return None
    up = _up(module)
    if names != {up, DOWN, *((f"{up}_bias", f"{DOWN}_bias") if module.has_bias else ())}:
        return None
    function: Function = module._apply_gate if module.has_gate else module.act_fn
    with apart():
        trial = torch.cat([torch.linspace(-8, 8, 48), torch.linspace(-1000, 1000, 16)]).view(2, 32)  # beyond any limit
        for known in ACTIVATIONS.values():
            activation = Gated(known) if module.has_gate else known
            if torch.equal(function(trial), activation(trial)):
                return activation
    return Traced(function, 0.5 if module.has_gate else 1.0)


def _up(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _compute_by_kernels(
    module: Any, activation: Activation, rows: Tensor, counts: Sequence[int], gates: Tensor | None
) -> Tensor:
    up = _up(module)
    into, out = getattr(module, up), getattr(module, DOWN)  # adapters of peft replace them by sums
    up_bias, down_bias = getattr(module, f"{up}_bias", None), getattr(module, f"{DOWN}_bias", None)
    stack = ExpertStack(into, out, activation, up_bias, down_bias, transposed=module.is_transposed)
    return stacked_rows(rows, counts, gates, stack)


def _compute_by_forward(module: Any, rows: Tensor, counts: Sequence[int], gates: Tensor | None) -> Tensor:
    """Rows by the module's own forward, as tokens that have chosen one expert each.

    Without rows, gates still have a gradient: other ranks wait for it.
    """
    parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
    if not len(rows):
        return with_gradients(weighed(rows, gates), parameters)
    chosen = torch.arange(len(counts), device=rows.device).repeat_interleave(torch.tensor(counts, device=rows.device))
    weights = rows.new_ones(len(rows)) if gates is None else gates
    with _holding(module, len(counts)):
        forward = partial(type(module).forward, module)
        made: Tensor = forward(rows, chosen.unsqueeze(-1), weights.unsqueeze(-1))
    return with_gradients(made, parameters)


@contextmanager
def _holding(module: Any, experts: int) -> Iterator[None]:
    """Set the number of experts that a module holds, inside."""
    whole = getattr(module, NUMBER)
    setattr(module, NUMBER, experts)
    try:
        yield
    finally:
        setattr(module, NUMBER, whole)


class RoutedForward:
    """The forward of experts that take tokens, choices and weights, by one of tokens and their routing.

    Args:
        experts: E.
        forward: computes the experts' outputs.
    """

    def __init__(self, module: nn.Module, experts: int, forward: Forward) -> None:
        self._module, self._experts, self._forward = module, experts, forward
        self._names = list(inspect.signature(type(module).forward).parameters)[1:4]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """[..., D] -> [..., D]."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        x, chosen, weights = (given[name] for name in self._names)
        routing = routing_of(chosen, weights, self._experts)
        statistics = getattr(self._module, "statistics", None)
        with nullcontext() if statistics is None else statistics.watching(routing):
            return self._forward(x.reshape(-1, x.shape[-1]), routing).view(x.shape)


def routing_of(chosen: Tensor, weights: Tensor, experts: int) -> Routing:
    """The routing of T tokens that was made elsewhere.

    Args:
        chosen: the experts [T, k]; or a mask [T, k, E], all zero in a choice without a place in its expert's capacity.
            Such a mask does not tell which expert that was, so the counts are those of choices with a place.
        weights: [T, k].
        experts: E.
    """
    kept = None
    if chosen.dim() == 3:
        counts, kept, chosen = chosen.long().sum((0, 1)), chosen.any(-1), chosen.argmax(-1)
    else:
        chosen = chosen.long()
        places = chosen.reshape(-1).clamp(max=experts)  # what is no expert is refused where rows are sorted
        counts = chosen.new_zeros(experts + 1).index_add_(0, places, torch.ones_like(places))[:experts]
    gates = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return Routing(chosen, gates, kept, counts)
