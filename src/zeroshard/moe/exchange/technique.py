"""The technique of expert parallelism: each rank of a group keeps some experts of each mixture, and gets their rows.

The ranks of a group work on different data (GShard, 2006.16668, section 3.2; Switch, 2101.03961, section 5). An
expert's gradient exists once in a group, from the tokens of all its ranks; so it is summed over the groups only, and
divided by all data ranks, as for dense layers.

[Note: layouts] Data, model, and expert parallelism in any combination (Switch, section 5): data ranks are those of the
plan, tensor ranks split dense layers (`tensor.technique`), and `OwnTokens` deals out the tokens that these share.

[Note: own tokens] Ranks that split the layers around a mixture have the same tokens, and each sends a part of them.
Routers work on all tokens, alike on all these ranks; experts' inputs are cut after it, and joined before other layers
see them. So every rank of a stage may hold experts of its own, also those that split layers (Switch, section 5.5), and
of an expert no gradient is made twice.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor, nn

from zeroshard.errors import ModelError, PlanError
from zeroshard.moe.exchange.dispatch import combine, gather_gates, gather_rows, order_of
from zeroshard.moe.exchange.exchange import (
    BUFFERS,
    Delivery,
    Exchanged,
    ExpertBuffers,
    ExpertRanks,
    combine_with_grad,
    dispatch_with_grad,
    shared_out,
)
from zeroshard.moe.experts.families import FoundExperts, find_experts, unknown_mixtures
from zeroshard.moe.policy import ExpertParallel
from zeroshard.moe.routing.record import Routing
from zeroshard.parts.place import Axis, Piece, Split
from zeroshard.parts.technique import CUT, NewAxis, neighbours
from zeroshard.platform.shared_memory import machine
from zeroshard.tensor.split.collectives import CutRows, JoinRows, TensorRanks
from zeroshard.tensor.split.technique import AXIS as TENSOR
from zeroshard.tensor.split.technique import share_operands
from zeroshard.units.adapters import stack_adapters
from zeroshard.units.hooks import in_place_of, listen
from zeroshard.units.ignored import is_ignored

AXIS = "experts"


class ExpertTechnique:
    """Shares out the experts of one model; a `parts.technique.Technique`.

    Args:
        transport: of the plan.

    Attributes:
        zones: none, as activations of dense layers stay whole.
    """

    zones = None

    def __init__(self, policy: ExpertParallel, transport: str = "network") -> None:
        self._policy, self._transport = policy, transport

    def axes(self, ranks: int) -> Mapping[str, NewAxis]:
        """Neighbouring ranks.

        Raises:
            PlanError: they do not divide.
        """
        return {AXIS: NewAxis(neighbours(ranks, self._policy.ranks, "expert_parallel"), data=True)}

    def replicated_over(self, layer: str) -> str | None:
        """None: each rank has activations of its own."""
        return None

    def cut(self, model: nn.Module, axes: Mapping[str, Axis]) -> Mapping[nn.Parameter, Split]:
        """Keep this rank's experts of each mixture, and install the exchange of rows.

        Raises:
            PlanError: the model has no mixtures, or one with fewer experts than ranks. ModelError: experts that cannot
                be told apart.
        """
        axis, found = axes[AXIS], find_experts(model)
        self._check(found, model)
        if not self._policy.two_level:
            share_operands(axis.comm, self._transport)
        tensor = axes.get(TENSOR)
        tokens = None if tensor is None else OwnTokens(tensor)
        ranks = ExpertRanks(axis, self._machines(axis) if self._policy.two_level else None)
        cuts = _cuts(found, axis)
        adapters, modules = _adapter_cuts(model, found, cuts)
        places = _replace(model, found, cuts | adapters, modules)
        for each in found:
            each.count()
            each.install(ExchangedForward(each, ranks, tokens))
            setattr(each.module, CUT, True)
            setattr(each.module, BUFFERS, ExpertBuffers(each.modules, axis, each.path))
        return places

    def _check(self, found: Sequence[FoundExperts], model: nn.Module) -> None:
        ranks, name = self._policy.ranks, type(model).__name__
        unknown = [] if found else unknown_mixtures(model)
        if unknown:
            raise PlanError(
                f"expert_parallel={ranks} needs mixtures of experts of a known structure, and that of "
                f"{' and '.join(unknown)} in {name} is not known. Known are zs.moe.MoE, and modules with parameters "
                f"that are all [experts, ...], or lists of alike modules, whose forward takes tokens, the experts "
                f"chosen for them, and the weights of these. Leave expert_parallel out; zero=3 and offload hold such "
                f"experts as any other parameters."
            )
        if not found:
            raise PlanError(
                f"expert_parallel={ranks} is for models with mixtures of experts, and none was found in {name}. Put "
                f"zs.moe.MoE into it, or let zs.moe.replace_ffn(model) do so; or leave expert_parallel out."
            )
        for each in found:
            if each.experts < ranks:
                raise PlanError(
                    f"expert_parallel={ranks} is more than the {each.experts} experts of {each.path!r}. Set it to "
                    f"{each.experts} at most; more ranks can split the layers around it, with tensor_parallel."
                )

    def _machines(self, axis: Axis) -> Sequence[Sequence[int]]:
        """The ranks of each machine.

        Raises:
            PlanError: machines have unlike numbers of them.
        """
        names = axis.comm.agree_on(machine(), "machines of experts")
        order = sorted(range(axis.size), key=lambda rank: (names.index(names[rank]), rank))
        found = [list(members) for _, members in groupby(order, lambda rank: names.index(names[rank]))]
        if len({len(members) for members in found}) > 1:
            raise PlanError(
                f"expert_parallel.two_level=True needs equally many ranks of a group on each machine, and there are "
                f"{', '.join(str(len(members)) for members in found)}. Leave it out, or start ranks evenly."
            )
        return found


class CutTokens(CutRows):
    """As `CutRows`, around parameters that are no parts or copies of those of split layers."""


class JoinTokens(JoinRows):
    """As `JoinRows`, likewise."""


class OwnTokens:
    """The division of tokens among ranks with the same tokens."""

    def __init__(self, axis: Axis) -> None:
        self._ranks = TensorRanks(axis)

    def cut(self, x: Tensor, routing: Routing, label: str) -> tuple[Tensor, Routing]:
        """Of tokens [T, D] and their routing this rank's; gradients are joined."""
        start, stop = self._ranks.rows(len(x))
        kept = None if routing.kept is None else routing.kept[start:stop]
        gates = self._cut(routing.gates, f"gates of {label}")
        return self._cut(x, label), replace(routing, experts=routing.experts[start:stop], gates=gates, kept=kept)

    def join(self, output: Tensor, tokens: int, label: str) -> Tensor:
        """The outputs [T, D] of so many tokens, from this rank's; gradients are cut."""
        joined: Tensor = JoinTokens.apply(output, self._ranks, 0, tokens, label)  # type: ignore[no-untyped-call]
        return joined

    def _cut(self, x: Tensor, label: str) -> Tensor:
        own: Tensor = CutTokens.apply(x, self._ranks, 0, label)  # type: ignore[no-untyped-call]
        return own


class ExchangedForward:
    """The forward of experts that lie on several ranks; a collective call of these.

    Gates go with their rows: where an expert multiplies by them, nothing keeps its outputs for the gates' gradients.

    Args:
        tokens: of this rank, where others have the same; None where none have.
    """

    def __init__(self, found: FoundExperts, ranks: ExpertRanks, tokens: OwnTokens | None = None) -> None:
        self._found, self._ranks, self._tokens = found, ranks, tokens

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """[T, D] -> [T, D]."""
        if self._tokens is None:
            return self._exchange(x, routing)
        own = self._exchange(*self._tokens.cut(x, routing, f"input of {self._found.path}"))
        return self._tokens.join(own, len(x), f"output of {self._found.path}")

    def _exchange(self, x: Tensor, routing: Routing) -> Tensor:
        found, ranks, label = self._found, self._ranks, self._found.path
        if torch._C._current_graph_task_id() != -1:
            ranks.forget_formula()
        order = order_of(routing, found.experts)
        delivery = ranks.delivery(order.counts, x, f"rows of {label}")
        gates = dispatch_with_grad(
            gather_gates(routing.gates, order).unsqueeze(-1), ranks, delivery, f"gates of {label}"
        )
        rows = dispatch_with_grad(gather_rows(x, order), ranks, delivery, f"rows of {label}")
        first, stop = delivery.held[ranks.rank]
        counts = delivery.local
        if found.modules:  # those of other ranks' experts are there, and empty
            counts = [*(0,) * first, *counts, *(0,) * (found.experts - stop)]
        made = found.compute(rows, counts, gates.squeeze(-1))
        outputs = combine_with_grad(made, ranks, delivery, f"outputs of {label}")
        self._plan(delivery, outputs)
        return combine(outputs, order)

    def _plan(self, delivery: Delivery, outputs: Tensor) -> None:
        """Enter the formula of a forward, and with its backward that of this."""
        own, plan = delivery.rows(self._ranks.rank, self._ranks.rank), self._ranks.plan
        formula = Exchanged(sum(delivery.sends) - own, sum(delivery.receives) - own, outputs.shape[-1])
        if not outputs.is_meta:
            plan(formula.forward)
            listen(outputs, lambda gradient: plan(formula.backward))


def _cuts(found: Sequence[FoundExperts], axis: Axis) -> dict[nn.Parameter, Split]:
    """The shard of this rank of each expert parameter; mixtures may share parameters.

    Raises:
        ModelError: an expert has a parameter without dimensions, or one that belongs to an expert of another rank too.
    """
    kept: dict[nn.Parameter, list[tuple[int, int]]] = {}  # by each rank: the elements [first, stop) along dimension 0
    for each in found:
        held = shared_out(each.experts, axis.size)
        kept |= {each.module.get_parameter(name): held for name in each.stacked}
        owners = [rank for rank, (first, stop) in enumerate(held) for _ in range(first, stop)]
        for owner, module in zip(owners, each.modules, strict=bool(each.modules)):
            for name, parameter in module.named_parameters():
                if not parameter.dim():
                    raise ModelError(
                        f"The parameter {name!r} of the experts of {each.path!r} is a scalar, which expert_parallel "
                        f"cannot keep on one rank; give it one dimension: torch.ones(1)."
                    )
                whole = [(0, len(parameter) if rank == owner else 0) for rank in range(axis.size)]
                if kept.setdefault(parameter, whole) != whole:
                    raise ModelError(
                        f"The parameter {name!r} of the experts of {each.path!r} is shared by experts of several "
                        f"ranks, of which expert_parallel={axis.size} keeps it on one. Give each expert its own, or "
                        f"put what they share into the layer around them."
                    )
    return {parameter: _split(parameter, *of_ranks[axis.rank]) for parameter, of_ranks in kept.items()}


def _split(parameter: nn.Parameter, first: int, stop: int) -> Split:
    return Split(AXIS, tuple(parameter.shape), 0, (Piece(first, stop),) if stop > first else ())


def _adapter_cuts(
    model: nn.Module, found: Sequence[FoundExperts], cuts: Mapping[nn.Parameter, Split]
) -> tuple[dict[nn.Parameter, Split], set[nn.Module]]:
    """The shards of adapters of stacked experts, and the modules that hold them; the layers count own experts then."""
    splits, modules = dict[nn.Parameter, Split](), set[nn.Module]()
    for each in found:
        for name, layers in stack_adapters(model, each.module).items():
            pieces = cuts[each.module.get_parameter(name)].pieces
            first, stop = (pieces[0].start, pieces[0].stop) if pieces else (0, 0)
            for layer in layers:
                for adapter, rank in layer.r.items():
                    a, b = layer.lora_A[adapter], layer.lora_B[adapter]
                    columns = tuple(Piece(n * each.experts + first, n * each.experts + stop) for n in range(rank))
                    splits[a.weight] = _split(a.weight, first * rank, stop * rank)
                    splits[b.weight] = Split(AXIS, tuple(b.weight.shape), 1, columns if stop > first else ())
                    modules |= {a, b}
                layer.num_experts = stop - first
    return splits, modules


def _replace(
    model: nn.Module,
    found: Sequence[FoundExperts],
    cuts: Mapping[nn.Parameter, Split],
    adapters: Collection[nn.Module] = (),
) -> dict[nn.Parameter, Split]:
    """Replace parameters by this rank's parts, in all modules that hold them.

    Args:
        adapters: modules beside the experts that hold parts.

    Raises:
        ModelError: a parameter of an expert stands outside of mixtures too. PlanError: the plan ignores one.
    """
    inside = {*adapters, *(module for each in found for module in each.module.modules())}
    sites: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in cuts:
                if is_ignored(parameter):
                    raise PlanError(
                        f"The plan ignores {f'{path}.{name}'.lstrip('.')!r}, a parameter of experts, which "
                        f"expert_parallel keeps on one rank each. Leave it out of ignored, and freeze it with "
                        f"requires_grad_(False) if it is not to be trained; routers and layers around may be ignored."
                    )
                sites[parameter].append((module, name))
                if module not in inside:
                    raise ModelError(
                        f"{f'{path}.{name}'.lstrip('.')!r} is a parameter of an expert too, and expert_parallel keeps "
                        f"an expert's parameters on one rank. Untie it, or leave expert_parallel out."
                    )
    places = {}
    for parameter, split in cuts.items():
        part = in_place_of(parameter, split.part_of(parameter.detach()))
        for module, name in sites[parameter]:
            module._parameters[name] = part
        places[part] = split
    return places
