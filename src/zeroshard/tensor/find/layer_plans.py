"""Plans that name layers: the user's, and the `_tp_plan` of models of transformers.

A pattern is a module's path in which `*` matches within one component, as in `layers.*.mlp.up_proj`; the prefix of a
model of transformers (`model.`) may be left out.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from zeroshard.errors import PlanError
from zeroshard.tensor.find.found import Style
from zeroshard.tensor.find.layout import every
from zeroshard.tensor.find.linear import linear_features, why_no_linear
from zeroshard.units.ignored import is_ignored

SETTING = "tensor_parallel.layers"
NEAR = 3  # names that are offered for a pattern that matches nothing
NAMES: Mapping[str, Style | None] = {  # None: nothing that a layer must do
    **{style.value: style for style in Style if style not in (Style.HEADS, Style.EXPERTS)},
    **{"ColwiseParallel": Style.COLUMN, "RowwiseParallel": Style.ROW},
    **dict.fromkeys(("SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")),
    # as transformers writes them
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"), Style.COLUMN),
    **dict.fromkeys(("rowwise", "rowwise_split_input", "rowwise_rep"), Style.ROW),
    "embedding_rowwise": Style.EMBEDDING,
    "replicate": Style.WHOLE,
    **dict.fromkeys(("sequence_parallel", "replicated_with_grad_allreduce", "all_reduce")),
}
GATHERED = {"colwise_gather_output", "colwise_rep", "packed_colwise", "rowwise_split_input", "rowwise_rep"}
REFUSED = {  # and why
    "embedding_colwise": "an embedding is split by its vocabulary, not by its features",
    "packed_rowwise": "input features that are packed are not split",
    "mla_kv_a_proj": "latent attention is not split",
    **dict.fromkeys(("moe_tp_experts", "moe_identity_expert", "grouped_gemm"), "experts are not split"),
    **dict.fromkeys(("ep_dispatch_experts", "ep_router"), "experts are not split"),
    "local_params": "parameters outside of linear layers and embeddings are not split",
}


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """The entry of a plan for one module.

    Attributes:
        style: how to split it; `WHOLE` covers all modules inside.
        said: the plan's own text and its source.
        gathered: whether the plan gathers features between a column-parallel and a row-parallel layer, because their
            order prevents an even split (fused projections), or because a layer needs all of them.
        refused: why a style of the plan is not supported; "" if it is.
    """

    style: Style
    said: str
    gathered: bool = False
    refused: str = ""


def user_layers(model: nn.Module, styles: Sequence[tuple[str, str]]) -> dict[str, PlannedLayer]:
    """Entries of the user's patterns, by path of the module.

    Raises:
        PlanError: a pattern that matches nothing, a style that is unknown or does not fit, a layer that is named twice.
    """
    paths = _Paths(model)
    found: dict[str, PlannedLayer] = {}
    by: dict[str, str] = {}
    for pattern, text in styles:
        matches = paths.of(pattern)
        if not matches:
            raise PlanError(f"{SETTING} names {pattern!r}, which is no module of the model.{paths.near(pattern)}")
        planned = _planned(text, f"layers says {text!r}")
        if planned is None:
            continue
        if planned.refused:
            raise PlanError(f"{SETTING} gives {pattern!r} the style {text!r}: {planned.refused}. Leave it out.")
        for path, fitting in (each for match in matches for each in _named(model.get_submodule(match), match, planned)):
            if path in by:
                raise PlanError(f"{SETTING} names {path!r} twice, by {by[path]!r} and by {pattern!r}; name it once.")
            by[path], found[path] = pattern, fitting
    return found


def with_ignored(model: nn.Module, found: Mapping[str, PlannedLayer]) -> dict[str, PlannedLayer]:
    """The user's entries, and those of the modules whose own parameters the plan ignores: they are whole.

    Raises:
        PlanError: an entry splits one of them.
    """
    ignored = dict[str, PlannedLayer]()
    for path, module in model.named_modules():
        if any(map(is_ignored, module.parameters(recurse=False))):
            ignored[path] = PlannedLayer(Style.WHOLE, "the plan ignores its parameters")
            if path in found and found[path].style is not Style.WHOLE:
                raise PlanError(
                    f"{SETTING} gives {path!r} the style {found[path].style.value!r}, and the plan ignores its "
                    f"parameters, which stay whole on every rank. Leave it out of layers, or out of ignored."
                )
    return {**found, **ignored}


def model_layers(model: nn.Module) -> dict[str, PlannedLayer]:
    """Entries of the plans of the models of transformers in `model`, by path of the module."""
    found: dict[str, PlannedLayer] = {}
    roots: list[str] = []
    for root, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)
        if not isinstance(plan, Mapping) or not plan or any(_inside(root, other) for other in roots):
            continue
        roots.append(root)
        names = [path for path, _ in module.named_modules()]
        parameters = [path for path, _ in module.named_parameters()]
        for pattern, text in plan.items():
            said = f"{text!r} in the model's plan"
            planned = _planned(str(text), said)
            if planned is None:
                continue
            pattern = str(pattern).removesuffix(".weight")
            for path in (path for path in names if _matches(path, pattern)):
                found[_join(root, path)] = _fitting(module.get_submodule(path), planned)
            for path in (path for path in parameters if _matches(path, pattern)):  # experts, which are no modules
                owner, _, name = path.rpartition(".")
                refused = f"its plan splits the parameter {name}, which is in no linear layer"
                found[_join(root, owner)] = PlannedLayer(Style.WHOLE, said, refused=refused)
    return found


def _planned(text: str, said: str) -> PlannedLayer | None:
    """The entry for a style; None for a style that needs no split.

    Raises:
        PlanError: an unknown style in the user's plan.
    """
    if text in REFUSED:
        return PlannedLayer(Style.WHOLE, said, refused=REFUSED[text])
    if text not in NAMES:
        if said.startswith("layers"):
            known = ", ".join(name for name in NAMES)
            near = difflib.get_close_matches(text, NAMES, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Styles are {known}."
            raise PlanError(f"{SETTING} has a style {text!r}, which is none. {hint}")
        return PlannedLayer(Style.WHOLE, said, refused=f"the style {text!r} of its plan is not known")
    style = NAMES[text]
    return None if style is None else PlannedLayer(style, said, text in GATHERED)


def _fitting(module: nn.Module, planned: PlannedLayer) -> PlannedLayer:
    """The entry for this module: torch's RowwiseParallel of an embedding becomes `EMBEDDING`."""
    rows = isinstance(module, nn.Embedding) and planned.style is Style.ROW
    return replace(planned, style=Style.EMBEDDING) if rows else planned


def _named(module: nn.Module, path: str, planned: PlannedLayer) -> Iterator[tuple[str, PlannedLayer]]:
    """The modules of a match with their entries: for `WHOLE` all modules inside, else the module itself.

    Raises:
        PlanError: the style does not fit the module.
    """
    if planned.style is Style.WHOLE:
        yield from ((_join(path, name), planned) for name, _ in module.named_modules())
        return
    planned = _fitting(module, planned)
    if planned.style is Style.EMBEDDING:
        why = "" if isinstance(module, nn.Embedding) else f"a {type(module).__name__} is no embedding"
    elif planned.style is Style.OUTPUT and hasattr(module, "loss_chunk"):
        why = ""  # an output layer that makes the loss itself
    else:
        why = "" if linear_features(module) else why_no_linear(module)
    if why:
        raise PlanError(
            f"{SETTING} gives {path!r} the style {planned.style.value!r}, and {why}. Name an nn.Linear, "
            f"a Conv1D of transformers or, for 'embedding', an nn.Embedding; or leave it out."
        )
    yield path, planned


class _Paths:
    """The paths of a model's modules in all forms that patterns may have."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = [path for path, _ in model.named_modules() if path]
        roots = [(path, module) for path, module in model.named_modules() if hasattr(module, "base_model_prefix")]
        prefixes = {path for path, _ in roots} | {_join(path, str(m.base_model_prefix)) for path, m in roots}
        self._prefixes = sorted(f"{prefix}." for prefix in prefixes if prefix)

    def of(self, pattern: str) -> list[str]:
        """The paths that a pattern matches."""
        wanted = pattern.removesuffix(".weight")
        return [path for path in self._paths if any(_matches(way, wanted) for way in self._ways(path))]

    def near(self, pattern: str) -> str:
        """A sentence with paths similar to a pattern."""
        ways = dict.fromkeys(every(way) for path in self._paths for way in self._ways(path))
        near = difflib.get_close_matches(every(pattern), ways, n=NEAR)
        offered = f" Did you mean {' or '.join(map(repr, near))}?"
        return offered if near else " Write a path as named_modules() gives it."

    def _ways(self, path: str) -> Iterator[str]:
        yield path
        yield from (path.removeprefix(prefix) for prefix in self._prefixes if path.startswith(prefix))


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _join(root: str, path: str) -> str:
    return f"{root}.{path}".strip(".")


def _inside(path: str, root: str) -> bool:
    return not root or f"{path}.".startswith(f"{root}.")
