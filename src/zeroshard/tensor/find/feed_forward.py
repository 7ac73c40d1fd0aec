"""Feed-forward layers: up projections to the inner features, and the down projection."""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from zeroshard.tensor.find.found import Segment
from zeroshard.tensor.find.layout import CannotSplit, DoesNotDivide, SplitLayout
from zeroshard.tensor.find.linear import class_path, linear_features

UP = (
    *("up_proj", "gate_proj", "gate_up_proj", "fc1", "fc_1", "c_fc", "wi", "wi_0", "wi_1", "w1", "w3", "linear1"),
    *("lin1", "dense_h_to_4h", "up", "gate", "fc_in", "fc", "linear_1", "fc0", "w_in", "up_gate_proj", "gate_and_up"),
)
DOWN = (
    *("down_proj", "fc2", "fc_2", "c_proj", "wo", "w2", "linear2", "lin2", "dense_4h_to_h", "down", "fc_out", "proj"),
    *("linear_2", "w_out", "out_proj"),
)
TOGETHER = (("intermediate", "output"),)  # two modules with one of the layers each
IN_PARTS = frozenset({"transformers.models.phi3.modeling_phi3.Phi3MLP"})  # one layer makes the gate, then what it gates


def feed_forward_layouts(
    modules: Mapping[str, nn.Module], columns: Sequence[str], row: str, ranks: int
) -> Iterator[SplitLayout]:
    """Possible layouts of the inner features in the layers.

    Raises:
        CannotSplit: the layers' shapes do not fit.
        DoesNotDivide: the ranks do not divide the inner features.
    """
    features = {path: linear_features(modules[path]) for path in (*columns, row)}
    made = {path: found.outputs for path, found in features.items() if found is not None}
    last = features[row]
    assert last is not None
    inner, name = last.inputs, row.rpartition(".")[0]
    fused = {path: made[path] // inner for path in columns if made[path] != inner}
    if any(made[path] % inner for path in columns) or (fused and len(columns) > 1):
        outputs = " and ".join(str(made[path]) for path in columns)
        raise CannotSplit(f"it makes {outputs} features, and its last layer reads {inner}")
    if inner % ranks:
        fine = [t for t in range(2, 65) if inner % t == 0]
        named = repr(name) if name else type(modules[name]).__name__
        raise DoesNotDivide(name, f"{named} has {inner} inner features", "does not divide them", fine, "it")
    reasons = dict.fromkeys((*columns, row), f"{inner // ranks} of {inner} inner features")
    holder = columns[0].rpartition(".")[0]
    beside, gathers, unknown = _others(modules, holder, {*columns, row}, made, inner, ranks)
    known = not fused or class_path(modules[holder]) in IN_PARTS
    for apart in (True,) if known else (True, False):
        for more in ((), tuple(beside)) if beside else ((),):
            segments: dict[str, tuple[Segment, ...]] = {path: (Segment(inner, ranks),) for path in (*columns, row)}
            for path in (*fused, *more):
                parts = made.get(path, beside.get(path, inner)) // inner
                segments[path] = (Segment(inner, ranks),) * parts if apart else (Segment(parts * inner, ranks),)
                order = "one after the other" if apart else "next to each other"
                times = f", {parts} times, {order}" if parts > 1 else ""
                reasons[path] = f"{inner // ranks} of {inner} inner features{times}"
            yield SplitLayout(segments, unknown=unknown, reasons=dict(reasons), certain=known, gathers=gathers)


def _others(
    modules: Mapping[str, nn.Module], holder: str, layers: set[str], made: Mapping[str, int], inner: int, ranks: int
) -> tuple[dict[str, int], dict[str, tuple[Segment, ...]], tuple[str, ...]]:
    """Other modules with parameters: linear layers that make the same features, norms over all, and unknown ones."""
    beside: dict[str, int] = {}
    gathers: dict[str, tuple[Segment, ...]] = {}
    unknown: list[str] = []
    for name, module in modules[holder].named_modules():
        path, own = f"{holder}.{name}".strip("."), list(module.parameters(recurse=False))
        if path in layers or not own:
            continue
        found = linear_features(module)
        if name and found is not None and found.outputs in made.values():
            beside[path] = found.outputs
        elif name and all(tuple(parameter.shape) == (inner,) for parameter in own):
            gathers[path] = (Segment(inner, ranks),)
        unknown += [] if path in gathers else [path]
    return beside, gathers, tuple(unknown)
