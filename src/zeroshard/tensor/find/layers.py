"""The search for layers to split: by the user's plan, the model's plan, or the structure of modules.

Layers come in groups: column-parallel layers and the row-parallel layer that reads their output (Megatron-LM,
1909.08053). For each module the user's plan decides; else the plan of a model of transformers; else its structure.
A group is split only if a trial of its forward agrees ([Note: Trials]); uncertain layers stay whole, with a reason.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from zeroshard.errors import PlanError
from zeroshard.parts.technique import CUT
from zeroshard.tensor.find import model_trial
from zeroshard.tensor.find.attention import KNOWN_ORDERS, attention_layouts
from zeroshard.tensor.find.experts import find_experts
from zeroshard.tensor.find.feed_forward import IN_PARTS, feed_forward_layouts
from zeroshard.tensor.find.found import AttentionSizes, FoundLayer, FoundLayers, Style
from zeroshard.tensor.find.groups import Group, Source, is_attention, own_groups, planned_groups
from zeroshard.tensor.find.layer_plans import PlannedLayer, model_layers, user_layers, with_ignored
from zeroshard.tensor.find.layout import CannotSplit, DoesNotDivide, SplitLayout, refusal
from zeroshard.tensor.find.linear import class_path, linear_features, why_no_linear
from zeroshard.tensor.find.small_run import Calls, likeness
from zeroshard.tensor.find.stacks import stacks_of, why_whole_sequences
from zeroshard.tensor.find.trial import Trial, TrialVerdict
from zeroshard.tensor.find.vocabulary import find_vocabulary, known_vocabulary
from zeroshard.tensor.policy import TensorParallel
from zeroshard.tensor.split.heads import head_dimension

MODELS = "transformers.models."
KNOWN = {  # classes whose forwards have been read, which are split even where they cannot be tried
    *KNOWN_ORDERS,
    *IN_PARTS,
    *(f"zeroshard.train.gpt.{name}" for name in ("Attention", "MLP")),
    *(f"{MODELS}gpt2.modeling_gpt2.{name}" for name in ("GPT2Attention", "GPT2MLP")),
    *(f"{MODELS}falcon.modeling_falcon.{name}" for name in ("FalconAttention", "FalconMLP")),
    *(f"{MODELS}opt.modeling_opt.{name}" for name in ("OPTAttention", "OPTDecoderLayer")),
    *(f"{MODELS}bert.modeling_bert.{name}" for name in ("BertSelfAttention", "BertCrossAttention", "BertIntermediate")),
    *(f"{MODELS}t5.modeling_t5.{name}" for name in ("T5Attention", "T5DenseActDense", "T5DenseGatedActDense")),
}
WHOLE: tuple[tuple[type[nn.Module], str], ...] = (  # with all that is in them
    (nn.MultiheadAttention, "nn.MultiheadAttention hands its weights to one function, which has all heads"),
    (nn.TransformerEncoderLayer, "it holds nn.MultiheadAttention, and reads weights of its layers itself"),
    (nn.TransformerDecoderLayer, "it holds nn.MultiheadAttention, and reads weights of its layers itself"),
    (nn.RNNBase, "a recurrent layer has no order in which its features could be split"),
)


def find(model: nn.Module, ranks: int, policy: TensorParallel) -> FoundLayers:
    """The split of a model's layers among `ranks`.

    It reads shapes only, so the model may be on the meta device, and changes nothing.

    Raises:
        PlanError: heads or features that the ranks do not divide; patterns of the user that match nothing, contradict
            each other or do not fit.
    """
    if ranks == 1:
        return FoundLayers()
    calls = Calls(model)
    found = _Search(model, ranks, policy, calls, {}).found()
    differing = model_trial.differing(model, found, ranks)
    if differing:
        reason = f"in small, split and whole, the model differs in {differing}"
        experts = {layer.name for layer in found.layers if layer.style is Style.EXPERTS}
        for kept in filter(None, (experts, experts | _holders(found))):
            found = _Search(model, ranks, policy, calls, dict.fromkeys(kept, reason)).found()
            if not (differing := model_trial.differing(model, found, ranks)):
                return found
        if differing:
            raise PlanError(
                f"tensor_parallel={ranks} splits layers of {type(model).__name__} that do not work apart: in small, "
                f"split and whole, the model differs in {differing}. Leave the layers around it whole: "
                f"TensorParallel({ranks}, layers={{path: 'whole'}})."
            )
    return found


def _holders(found: FoundLayers) -> set[str]:
    """The modules that hold split layers with heads."""
    heads = (layer for layer in found.layers if layer.style is Style.COLUMN and layer.head_size)
    return {layer.name.rpartition(".")[0] for layer in heads}


class _Search:
    """The search in one model.

    Args:
        kept: modules whose layers stay whole, with the reason.
    """

    def __init__(
        self, model: nn.Module, ranks: int, policy: TensorParallel, calls: Calls, kept: Mapping[str, str]
    ) -> None:
        self._model, self._ranks, self._policy, self._calls, self._kept = model, ranks, policy, calls, kept
        self._modules = dict(model.named_modules())
        self._layers: dict[str, FoundLayer] = {}
        self._reasons: dict[str, str] = {}
        self._attentions: list[AttentionSizes] = []
        self._indivisible: list[DoesNotDivide] = []
        self._odd: dict[str, str] = {}  # reasons of layers that are still free for another group
        self._verdicts: dict[Any, TrialVerdict] = {}
        self._holders: dict[nn.Parameter, str] = {}  # of parameters that are split
        self._fixed: set[str] = set()  # paths that the user names

    def found(self) -> FoundLayers:
        """The split of the whole model."""
        user = with_ignored(self._model, user_layers(self._model, self._policy.styles or ()))
        plan = model_layers(self._model)
        known = known_vocabulary(self._modules)
        known += [path for path in self._calls.vocabulary(self._modules) if path not in known]
        vocabulary, reasons = find_vocabulary(self._modules, known, self._ranks, plan | user, self._calls.elsewhere)
        self._reasons |= dict(self._known_whole())
        outputs = {path for path in known if not isinstance(self._modules[path], nn.Embedding)}
        for group in self._groups(user, plan, outputs):
            self._split(group)
        if self._indivisible:
            raise refusal(self._indivisible, self._ranks, alone=not (self._layers or vocabulary))
        self._reasons |= reasons
        self._layers |= vocabulary
        others = {path: each for path, each in self._modules.items() if path not in self._layers}
        whole = {path: reason for path, reason in self._reasons.items() if path in self._fixed} | dict(
            self._known_whole()
        )
        experts, reasons = find_experts(others, self._calls, self._ranks, {**whole, **self._kept})
        self._layers |= experts
        self._reasons |= reasons
        self._holders = {p: path for path in self._layers for p in _own(self._modules[path])}
        layers = {path: self._layer(path, module) for path, module in self._modules.items() if _own(module)}
        _check_shared(layers, self._modules)
        stacks = list(stacks_of(self._modules, layers))
        whole_sequences: list[tuple[str, str]] = []
        if self._policy.sequence:
            why = {
                path: why_whole_sequences(self._modules, path, b, layers, self._attentions, self._calls)
                for path, b in stacks
            }
            whole_sequences = [(path, reason) for path, reason in why.items() if reason]
            stacks = [(path, blocks) for path, blocks in stacks if not why[path]]
        blocks = tuple(tuple(blocks) for _, blocks in stacks)
        return FoundLayers(tuple(layers.values()), tuple(self._attentions), blocks, tuple(whole_sequences))

    def _known_whole(self) -> Iterator[tuple[str, str]]:
        for path, module in self._modules.items():
            reasons = [reason for kind, reason in WHOLE if isinstance(module, kind)]
            reasons += ["its parameters are shared out over ranks by another technique"] if hasattr(module, CUT) else []
            for reason in reasons:
                yield from ((f"{path}.{inner}".strip("."), reason) for inner, _ in module.named_modules())
        places: dict[nn.Module, dict[nn.Module, list[str]]] = {}  # of each layer, by the modules that hold it
        for path, module in self._model.named_modules(remove_duplicate=False):
            holder = self._model.get_submodule(path.rpartition(".")[0])
            places.setdefault(module, {}).setdefault(holder, []).append(path)
        for module, holders in places.items():
            if len(holders) > 1 and linear_features(module) is not None:
                paths = [path for of_holder in holders.values() for path in of_holder]
                yield from ((path, f"{len(holders)} modules have it") for path in paths)

    def _groups(
        self, user: dict[str, PlannedLayer], plan: dict[str, PlannedLayer], outputs: set[str]
    ) -> Iterator[Group]:
        """The groups to try: the user's, then the model's plan, then the structure."""
        order = list(self._modules)
        self._fixed = {*user}
        self._reasons |= {p: each.said for p, each in user.items() if each.style is Style.WHOLE}
        groups, _ = planned_groups(order, _without(user, outputs), Source.USER)
        yield from groups
        taken = {path.rpartition(".")[0] for path, each in user.items() if each.style in (Style.COLUMN, Style.ROW)}
        said = {path for path, each in user.items() if each.style is Style.WHOLE} | taken
        for path in (p for p in self._modules if p.rpartition(".")[0] in taken and p not in user):
            self._reasons.setdefault(path, "layers names others of its module, and not it")

        def free(path: str) -> bool:
            beside = path.rpartition(".")[0] in taken
            return not (beside or path in self._reasons or path in self._layers or path in said)

        self._reasons |= {p: each.refused for p, each in plan.items() if each.refused and free(p)}
        mine = {path: each for path, each in _without(plan, outputs).items() if free(path)}
        groups, reasons = planned_groups(order, mine, Source.MODEL)
        self._reasons |= reasons
        yield from groups
        yield from own_groups(self._modules, lambda path: free(path) and path not in outputs)

    def _split(self, group: Group) -> None:
        """Split a group of layers if its trial agrees.

        Raises:
            PlanError: the user's plan names the group, and it cannot be split.
        """
        holder = self._modules[group.holder]
        attention = is_attention(holder, group.columns)
        layouts: Iterator[SplitLayout]
        if attention:
            given = self._calls.of(group.holder)
            layouts = attention_layouts(self._modules, group.columns, group.row, self._ranks, given)
        else:
            layouts = feed_forward_layouts(self._modules, group.columns, group.row, self._ranks)
        reason = ""
        try:
            if group.holder in self._kept:
                raise CannotSplit(self._kept[group.holder])
            for path in (*group.columns, group.row):  # the model's own plan may name quantised ones
                if reason := why_no_linear(self._modules[path]):
                    raise CannotSplit(reason)
            for layout in layouts:
                more = layout.segments.keys() - {*group.columns, group.row}
                if more and (group.source is Source.USER or more & (self._fixed | self._layers.keys())):
                    continue
                verdict = self._try(group, layout)
                if verdict.agrees:
                    self._accept(group, layout, verdict.partial, "")
                    return
                if not verdict.ran and not layout.adapted and self._trusts(group, layout):
                    self._accept(group, layout, (*layout.partial, *layout.gathers), f"; not tried: {verdict.reason}")
                    return
                reason = reason or verdict.reason
                if not verdict.ran:
                    break
        except CannotSplit as error:
            reason = str(error)
        except DoesNotDivide as error:
            if group.source is Source.MODEL or (group.source is Source.STRUCTURE and self._in_blocks(group.row)):
                self._indivisible.append(error)
                return
            reason = str(refusal([error], self._ranks, alone=True)).partition(", or")[0]
            if group.source is Source.STRUCTURE:
                self._odd |= dict.fromkeys((*group.columns, group.row), reason)
                return
        if group.source is Source.USER:
            raise PlanError(
                f"tensor_parallel.layers splits {group.holder!r} ({type(holder).__name__}), which cannot be split: "
                f"{reason}. Leave {', '.join(map(repr, (*group.columns, group.row)))} out."
            )
        kind = "attention" if attention else "feed-forward layers"
        for path in (*group.columns, group.row):
            self._reasons[path] = f"{kind} of {type(holder).__name__}: {reason}"

    def _trusts(self, group: Group, layout: SplitLayout) -> bool:
        """Whether a group may be split without a trial."""
        if class_path(self._modules[group.holder]) in KNOWN:
            return True
        planned = group.source is Source.USER or (group.source is Source.MODEL and not group.gathered)
        return planned and layout.certain and not layout.unknown

    def _try(self, group: Group, layout: SplitLayout) -> TrialVerdict:
        if group.certain:
            return TrialVerdict(True, True)
        if layout.reuses:  # a trial of the whole model shows more
            return TrialVerdict(True, True, partial=(*layout.partial, *layout.gathers))
        around = group.tried(self._modules)
        module = self._modules[around]

        def inner(path: str) -> str:
            return "" if path == around else path.removeprefix(f"{around}.") if around else path

        trial = Trial(
            module,
            {inner(path): segments for path, segments in layout.segments.items() if path != group.row},
            {inner(path): segments for path, segments in layout.heads.items()},
            inner(group.row),
            layout.segments[group.row],
            {inner(path): sizes for path, sizes in layout.sizes.items()},
            layout.head_size,
            self._calls.of(around),
            _attention_of(group.holder, inner(group.holder), layout) if layout.number else None,
            [replace(layer, name=inner(layer.name)) for layer in _beside(layout, layout.gathers)],
        )
        shared = tuple((inner(path), features) for path, features in layout.shared.items())
        adapted = (layout.arguments, layout.narrow, shared, tuple(map(inner, layout.gathers)))
        key = (likeness(module), tuple(trial.columns.items()), trial.row, str(trial.sizes), adapted)
        if key not in self._verdicts:
            self._verdicts[key] = trial.run(self._ranks)
        verdict = self._verdicts[key]
        return replace(verdict, partial=tuple(f"{around}.{path}".strip(".") for path in verdict.partial))

    def _accept(self, group: Group, layout: SplitLayout, partial: tuple[str, ...], note: str) -> None:
        others = tuple(path for path in layout.segments if path != group.row)
        for path, segments in layout.segments.items():
            style, columns = (Style.ROW, others) if path == group.row else (Style.COLUMN, ())
            reason = f"{layout.reasons[path]}; {group.said.get(path, 'found by its shape')}{note}"
            size = layout.head_size
            self._layers[path] = FoundLayer(path, style, segments, reason, columns=columns, head_size=size)
        for path, segments in layout.heads.items():
            what = "column" if head_dimension(self._modules[path]) else "row"
            reason = f"a {what} for each head, {segments[0].size // self._ranks} of {segments[0].size}"
            self._layers[path] = FoundLayer(path, Style.HEADS, segments, reason)
        for layer in _beside(layout, partial):
            self._layers[layer.name] = layer
        for path in (path for path in partial if path not in layout.gathers):
            reason = "works on the features of its rank alone: its gradient is summed over the ranks"
            self._layers[path] = FoundLayer(path, Style.WHOLE, (), reason, partial=True)
        self._attentions += [_attention_of(path, path, layout) for path in layout.sizes]

    def _in_blocks(self, path: str) -> bool:
        parts = path.split(".")
        around = (self._modules[".".join(parts[:n])] for n in range(1, len(parts) - 1))
        return any(isinstance(module, nn.ModuleList) for module in around)

    def _layer(self, path: str, module: nn.Module) -> FoundLayer:
        """The layer of a module: split, or whole with a reason."""
        if path in self._layers:
            return self._layers[path]
        reason = self._reasons.get(path, self._odd.get(path))
        if reason is None:
            tied = list(dict.fromkeys(self._holders[p] for p in _own(module) if p in self._holders))
            reason = f"its parameters are those of {tied[0]}, and split with it" if tied else self._why_whole(module)
        return FoundLayer(path, Style.WHOLE, (), reason)

    def _why_whole(self, module: nn.Module) -> str:
        """Why a module outside of all plans and groups is whole."""
        kind = type(module).__name__
        if linear_features(module):
            return "no layer was found that makes what it reads, or reads what it makes, feature by feature"
        if isinstance(module, nn.Embedding):
            known = any(layer.style is Style.EMBEDDING for layer in self._layers.values())
            unknown = "not known to be of a vocabulary; layers can name it 'embedding'"
            return "not of the vocabulary" if known else unknown
        if kind.endswith("Norm"):
            return "a norm, which needs all features"
        return why_no_linear(module)


def _without(planned: Mapping[str, PlannedLayer], outputs: set[str]) -> dict[str, PlannedLayer]:
    """The layers of a plan, without those of the vocabulary and those with an unsupported style."""
    return {path: each for path, each in planned.items() if path not in outputs and not each.refused}


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _attention_of(path: str, name: str, layout: SplitLayout) -> AttentionSizes:
    """The layout's entry for the module at `path`, under `name`; only the first module has arguments and `narrow`."""
    first = path == next(iter(layout.sizes))
    arguments, narrow = (layout.arguments, layout.narrow) if first else ((), False)
    return AttentionSizes(name, layout.sizes[path], layout.number, arguments, narrow, layout.reuses)


def _beside(layout: SplitLayout, partial: Collection[str]) -> Iterator[FoundLayer]:
    """Whole layers that need more than sizes.

    Args:
        partial: modules between the split layers, by path.
    """
    for path, segments in layout.gathers.items():
        if path in partial:
            reason = "a norm over the features of all heads, which are gathered before it"
            yield FoundLayer(path, Style.WHOLE, segments, reason, partial=True, gathers=True)
    for path, features in layout.shared.items():
        reason = f"its last {features} features are for all heads: their gradients are summed over the ranks"
        yield FoundLayer(path, Style.WHOLE, (), reason, shared=features)


def _check_shared(layers: Mapping[str, FoundLayer], modules: Mapping[str, nn.Module]) -> None:
    """Refuse a parameter that several modules share but split differently.

    Raises:
        PlanError: with both names.
    """
    holders: dict[nn.Parameter, str] = {}
    split = sorted(layers, key=lambda path: layers[path].style is Style.WHOLE)
    for path in split:
        for name, parameter in modules[path].named_parameters(recurse=False):
            first = holders.setdefault(parameter, path)
            one, other = layers[first], layers[path]
            alike = one.segments == other.segments and (one.style is Style.ROW) == (other.style is Style.ROW)
            if alike or (name == "bias" and one.style is Style.OUTPUT):
                continue
            raise PlanError(
                f"{first!r} and {path!r} share the parameter {name!r}, and one is split ({one.style.value}) in another "
                f"way than the other ({other.style.value}). Leave both whole: TensorParallel(..., layers={{{first!r}: "
                f"'whole', {path!r}: 'whole'}})."
            )
