"""Chain: a model cut into layers that can be run one range at a time, with the model's class untouched.

The layers are what runs before the blocks (the prefix), the blocks, and what runs after them (the suffix). Running
layers [first, last) calls the model's own forward on the whole microbatch: modules of earlier layers are passed over,
the activation that comes from elsewhere takes the place of what enters layer `first`, and the forward is left as soon
as something is about to enter layer `last`. Masks, positions and the like, which the model makes from the microbatch,
are so made on every stage, and no parameter changes its name.

[Note: stand-ins] A module that is passed over answers with a stand-in: one NaN, seen in every element of the right
shape. The shape comes from the module's own forward on the meta device, where only shapes exist, once per input shape.
A module between or around the blocks whose output is made without any parameter, such as a table of rotary angles, is
never passed over: every stage needs its values.

[Note: what a chain is] Each layer may use what earlier layers made only through the one activation that enters it.
This is checked on the autograd graph of one forward: walking back from what leaves a layer to what entered it must
meet no other parameters than the layer's own. What goes another way unseen by autograd shows as NaN from a stand-in.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zeroshard.errors import ModelError
from zeroshard.pipeline.standins import Standins
from zeroshard.units import find_units

PREFIX, SUFFIX = "prefix", "suffix"


@dataclass(slots=True, eq=False)
class Layer:
    """One layer of a chain.

    Attributes:
        modules: those that run in it (a block with all that is inside).
        parameters: by name, what it computes with; a tied parameter appears in several layers.
    """

    number: int
    name: str
    modules: list[nn.Module] = field(default_factory=list)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


class Chain:
    """The layers of a model in the order in which they run.

    Args:
        model: wholly on the meta device, or wholly real.
        forward: runs the model on an example microbatch that is where the model is, down to the loss.
        blocks: names or classes of the blocks; by default the children of a `Sequential`, or the repeated blocks.

    Attributes:
        layers: prefix, blocks, suffix.
        frames: the modules around blocks, whose forwards run on every stage.

    Raises:
        ModelError: the model is no chain, with the names of what breaks it.
    """

    def __init__(self, model: nn.Module, forward: Callable[[], Any], blocks: Sequence[str] | None = None) -> None:
        self._paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        _refuse_mixture(model)
        found = _blocks(model, blocks)
        self._window: tuple[int, int] | None = None
        self._hidden: Tensor | None = None
        self._phase = 0
        self._probe: _Probe | None = None
        self._overwritten: set[int] = set()
        inside = {module for block in found for module in block.modules()}
        frames = {module for module in model.modules() if module not in inside and inside & set(module.modules())}
        self._number_of: dict[nn.Module, int] = dict.fromkeys(found, -1)
        self._gates = [_Gate(self, block) for block in found]
        self._gates += [_Gate(self, m) for m in model.modules() if m not in inside and m not in frames and _gated(m)]
        self.frames = frames
        self.standins = Standins()
        self.layers = self._find_layers(model, frames, forward)

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model."""
        return list(self._paths)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.layers) - 2

    def run(self, first: int, last: int, forward: Callable[[], Any], hidden: Tensor | None = None) -> Any:
        """Run layers [first, last) of the model that `forward` calls.

        Args:
            hidden: what enters layer `first`; None at the start of the model.

        Returns:
            What enters layer `last`, or what `forward` returns if `last` is past the suffix.
        """
        if hidden is not None and first in self._overwritten:
            hidden = hidden.clone()  # nobody may write into a leaf of autograd, nor into a message
        self._window, self._hidden, self._phase = (first, last), hidden, 0
        try:
            output = forward()
        except _Left as left:
            return left.hidden
        finally:
            self._window = self._hidden = None
        if self._phase < min(last, self.blocks + 1):
            raise ModelError(
                f"The forward ended before {self.layers[self._phase + 1].name!r} ran, which runs in the example; all "
                f"blocks of a chain must run for every microbatch."
            )
        return output

    def boundary(self, layer: int, forward: Callable[[], Any]) -> Tensor:
        """A stand-in, with shape and dtype, for what enters a layer on the microbatch that `forward` uses."""
        with torch.no_grad():
            hidden: Tensor = self.run(layer, layer, forward)
        return hidden

    def number(self, name: str) -> int:
        """The layer of a name.

        Raises:
            ModelError: there is no such layer.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer.number
        names = ", ".join(layer.name for layer in self.layers)
        raise ModelError(f"The model has no layer {name!r} to cut before; its layers are {names}.")

    def enter(self, gate: "_Gate", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a gated module returns, for its caller: its own output, or a stand-in."""
        if self._probe is not None:
            return self._probe.enter(gate, args, kwargs)
        if self._window is None:
            return gate.original(*args, **kwargs)
        first, last = self._window
        number = self._number_of.get(gate.module)
        if number is None:
            if gate.learned and not first <= self._phase < last:
                return self.standins.of(gate.module, gate.original, args, kwargs, gate.overwritten)
            return gate.original(*args, **kwargs)
        if number != self._phase + 1:
            raise ModelError(
                f"{self.layers[number].name!r} ran after {self.layers[self._phase].name!r}, which is not the order of "
                f"the example; the blocks of a chain must run in one order for every microbatch."
            )
        self._phase = number
        if number == last:
            raise _Left(_activation((args, kwargs), gate.takes, gate))
        if number == first and self._hidden is not None:
            args, kwargs = _with_activation((args, kwargs), gate.takes, self._hidden)
        if first <= number < last:
            output = gate.original(*args, **kwargs)
        else:
            output = self.standins.of(gate.module, gate.original, args, kwargs, gate.overwritten)
        if number == self.blocks:
            self._phase = number + 1
            if last == number + 1:
                raise _Left(_activation(output, gate.returns, gate))
            if first == number + 1 and self._hidden is not None:
                output = _with_activation(output, gate.returns, self._hidden)
        return output

    def sites(self, parameter: nn.Parameter) -> Iterator[tuple[nn.Module, str]]:
        """Where in the model a parameter stands: (module, name in it)."""
        for module in self._paths:
            for name, value in module._parameters.items():
                if value is parameter:
                    yield module, name

    def path(self, module: nn.Module) -> str:
        """The module's name in the model."""
        return self._paths[module]

    def _find_layers(self, model: nn.Module, frames: set[nn.Module], forward: Callable[[], Any]) -> list[Layer]:
        """Run the model once and see which module runs when, and that the layers are a chain."""
        probe = self._probe = _Probe(self, set(self._number_of))
        with _all_trainable(model), _unchanged(model):
            try:
                output = forward()
            finally:
                self._probe = None
            missing = [self._paths[block] for block in self._number_of if block not in probe.order]
            if missing:
                raise ModelError(
                    f"The block {missing[0]!r} did not run in a forward of the example; name the blocks of "
                    f"the chain with units=(...)."
                )
            layers = [Layer(0, PREFIX), *(Layer(n + 1, self._paths[b], [b]) for n, b in enumerate(probe.order))]
            layers.append(Layer(len(layers), SUFFIX))
            for number, block in enumerate(probe.order):
                self._number_of[block] = number + 1
            self._overwritten = {n + 1 for n, entered in enumerate(probe.entered) if entered._version}
            for gate, returned, version in probe.returned.values():
                gate.overwritten |= returned._version > version
            names = {parameter: name for name, parameter in model.named_parameters()}
            for gate in self._gates:
                for number in sorted(probe.phases.get(gate.module, {0})) if gate.module not in probe.order else ():
                    layers[number].modules.append(gate.module)
            for layer in layers:
                for module in layer.modules:
                    deep = module in self._number_of
                    for parameter in module.parameters(recurse=deep):
                        layer.parameters[names[parameter]] = parameter
            free = {p for frame in frames for p in frame.parameters(recurse=False)}
            _check_chain(layers, probe, output, names, free)
        return layers


class _Left(Exception):
    """Leaves the model's forward with what is about to enter the first layer that is not run."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the rest of the model is on other ranks")
        self.hidden = hidden


class _Gate:
    """Stands in for a module's forward.

    Attributes:
        original: the module's own forward.
        learned: whether what it returns is made with parameters, its own or those before it.
        overwritten: whether a frame writes into what it returns.
        takes: of a block, which leaf of its arguments is the activation.
        returns: of the last block, which leaf of its output is the activation.
    """

    def __init__(self, chain: Chain, module: nn.Module) -> None:
        self.chain, self.module = chain, module
        self.original: Callable[..., Any] = module.forward
        self.learned = next(module.parameters(), None) is not None
        self.overwritten = False
        self.takes = self.returns = 0
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.chain.enter(self, args, kwargs)


class _Probe:
    """What happens in one forward of the whole model.

    Attributes:
        order: the blocks as they ran.
        phases: of every other gated module, after how many blocks it ran.
        entered: what entered each block and the suffix.
        marks: the graph's nodes of these; None where nothing needs a gradient.
        returned: by id, what modules returned, with the version that they or others among them left it in.
    """

    def __init__(self, chain: Chain, blocks: set[nn.Module]) -> None:
        self._chain, self._blocks = chain, blocks
        self.order: list[nn.Module] = []
        self.phases: dict[nn.Module, set[int]] = {}
        self.entered: list[Tensor] = []
        self.marks: list[Any] = []
        self.returned: dict[int, tuple[_Gate, Tensor, int]] = {}
        self._phase = 0

    def enter(self, gate: _Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module and note it."""
        if gate.module not in self._blocks:
            self.phases.setdefault(gate.module, set()).add(self._phase)
            output = self._call(gate, args, kwargs)
            gate.learned |= any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
            return output
        if _unseen_by_autograd():
            raise ModelError(
                f"The block {self._chain.path(gate.module)!r} runs under torch.no_grad or torch.utils.checkpoint, "
                f"which hide from a stage what its backward needs; switch that off in the model (recompute='chunk' "
                f"recomputes whole chunks instead), name other blocks with units=(...), or use stages=1."
            )
        if gate.module in self.order:
            raise ModelError(
                f"The block {self._chain.path(gate.module)!r} runs twice in one forward, so the model is no chain of "
                f"blocks; name other blocks with units=(...), or use stages=1."
            )
        self.order.append(gate.module)
        self._phase = len(self.order)
        gate.takes = _place((args, kwargs))
        args, kwargs = self._mark((args, kwargs), gate.takes, gate)
        output = self._call(gate, args, kwargs)
        if len(self.order) == len(self._blocks):
            self._phase += 1
            gate.returns = _place(output)
            output = self._mark(output, gate.returns, gate)
        return output

    def _call(self, gate: _Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = gate.original(*args, **kwargs)
        self._chain.standins.record(gate.module, args, kwargs, output)
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self.returned:
                self.returned[id(leaf)] = (*self.returned[id(leaf)][:2], leaf._version)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.returned[id(leaf)] = gate, leaf, leaf._version
        return output

    def _mark(self, tree: Any, place: int, gate: _Gate) -> Any:
        marked = _activation(tree, place, gate).clone()  # a view would lose its mark when a block writes into it
        self.entered.append(marked)
        self.marks.append(marked.grad_fn)
        return _with_activation(tree, place, marked)


def _unseen_by_autograd() -> bool:
    """Whether a block runs without a graph, or in one that will be made again in the backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return not torch.is_grad_enabled() or (hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint")


def _check_chain(
    layers: list[Layer],
    probe: _Probe,
    output: Any,
    names: dict[nn.Parameter, str],
    free: set[nn.Parameter],
) -> None:
    """Refuse what reaches a layer otherwise than through the chain; enter the frames' own parameters into layers."""
    ends = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    for layer in layers:
        starts = ends if layer.number == len(layers) - 1 else [probe.marks[layer.number]]
        entrance = probe.marks[layer.number - 1] if layer.number else None
        passed = {mark: n for n, mark in enumerate(probe.marks) if mark is not None and mark not in starts}
        for node in _reach(starts, entrance):
            variable = getattr(node, "variable", None)
            if node in passed:
                raise ModelError(
                    f"{layer.name!r} uses what entered {layers[passed[node] + 1].name!r}, past the layers between, so "
                    f"the model is no chain; name other blocks with units=(...), or use stages=1."
                )
            if variable in free:
                layer.parameters[names[variable]] = variable
            elif variable in names and names[variable] not in layer.parameters:
                raise ModelError(
                    f"{layer.name!r} uses something made with {names[variable]!r} that does not come through the "
                    f"layer before it, so the model is no chain; name other blocks with units=(...), or use stages=1."
                )
    for parameter in free - {p for layer in layers for p in layer.parameters.values()}:
        layers[0].parameters[names[parameter]] = parameter


def _reach(starts: Sequence[Any], entrance: Any) -> Iterator[Any]:
    """The nodes of the graph below `starts`, not past `entrance`."""
    seen: set[Any] = set()
    stack = [node for node in starts if node is not None]
    first = set(stack)
    while stack:
        node = stack.pop()
        if node in seen or node is entrance:
            continue
        seen.add(node)
        if node not in first:
            yield node
        stack.extend(next_node for next_node, _ in node.next_functions if next_node is not None)


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    """Let every parameter take part in the graph."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Undo what a forward does to buffers and random numbers."""
    owned = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    before = [(buffer, buffer.clone()) for _, _, buffer in owned if buffer is not None and not buffer.is_meta]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, name, kept in owned:
            module._buffers[name] = kept
        with torch.no_grad():
            for buffer, values in before:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


def _refuse_mixture(model: nn.Module) -> None:
    kinds = {parameter.is_meta: name for name, parameter in model.named_parameters()}
    if len(kinds) > 1:
        raise ModelError(
            f"The parameter {kinds[True]!r} is on the meta device and {kinds[False]!r} is real; to be cut into layers, "
            f"a model must be wholly on meta, or wholly real."
        )


def _blocks(model: nn.Module, wanted: Sequence[str] | None) -> list[nn.Module]:
    if wanted is None and isinstance(model, nn.Sequential):
        return list(dict.fromkeys(model.children()))
    found = [unit.module for unit in find_units(model, wanted) if unit.name]
    if not found:
        raise ModelError(
            "The model has no repeated blocks to cut between; name its blocks with units=(...), or use stages=1."
        )
    return found


def _gated(module: nn.Module) -> bool:
    return bool(module._parameters) or not module._modules


def _place(tree: Any) -> int:
    """Which leaf is the activation: the first that is made with parameters, else the first that could be one."""
    leaves = tree_leaves(tree)
    carriers = [n for n, leaf in enumerate(leaves) if _carries(leaf)]
    return next((n for n in carriers if leaves[n].requires_grad), carriers[0] if carriers else len(leaves))


def _activation(tree: Any, place: int, gate: _Gate) -> Tensor:
    leaves = tree_leaves(tree)
    if place < len(leaves) and _carries(leaves[place]):
        hidden: Tensor = leaves[place]
        return hidden
    raise ModelError(
        f"The block {gate.chain.path(gate.module)!r} takes or returns no floating-point tensor to hand on to the next "
        f"stage; name other blocks with units=(...)."
    )


def _with_activation(tree: Any, place: int, hidden: Tensor) -> Any:
    leaves, spec = tree_flatten(tree)
    leaves[place] = hidden
    return tree_unflatten(leaves, spec)


def _carries(leaf: Any) -> bool:
    """Whether a value can be handed from stage to stage and a gradient back."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
