"""Chain: a model cut into layers that can be run one range at a time, with the model's class untouched.

The layers are the modules before the blocks (the prefix), the blocks, and the modules after them (the suffix). Running
layers [first, last) calls the model's own forward on the whole microbatch: modules of earlier layers are skipped, the
received activation replaces the input of layer `first`, and the forward is left before layer `last`. So every stage
makes masks, positions and the like from the microbatch itself, and no parameter changes its name.

[Note: placeholders] A skipped module returns a placeholder: one NaN, expanded to the right shape. The shape comes from
the module's own forward on the meta device, once per input shape. A module between or around the blocks whose output
does not depend on parameters, such as a table of rotary angles, is never skipped: every stage needs its values.

[Note: what a chain is] Each layer may use results of earlier layers only through the one activation that enters it.
This is checked on the autograd graph of one forward: the path back from a layer's output to its input must meet only
the layer's own parameters. Values without a gradient may bypass it: they are sent beside it
([Note: values beside the activation]).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.errors import ModelError
from zeroshard.pipeline.cut.bypass import Bypass, Crossing
from zeroshard.pipeline.cut.gates import Gate, activation_at, with_activation
from zeroshard.pipeline.cut.placeholders import Placeholders, stand_in, unsent
from zeroshard.pipeline.cut.probe import BufferUses, Probe, all_trainable, unchanged, without_weights
from zeroshard.units import find_units
from zeroshard.units.watched_parameters import Absent

PREFIX, SUFFIX = "prefix", "suffix"
Entered = Callable[[int, Tensor], None]  # the number of a layer, and the activation that enters it


@dataclass(slots=True, eq=False)
class Layer:
    """One layer of a chain.

    Attributes:
        modules: modules that run in it (a block includes its submodules).
        parameters: its parameters by name; a tied parameter appears in several layers.
    """

    number: int
    name: str
    modules: list[nn.Module] = field(default_factory=list)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


@dataclass(slots=True)
class _Passage:
    """One run of a range of layers: its input, and the number of the last block that ran."""

    first: int
    last: int
    hidden: Tensor | None
    entered: "Entered | None"
    bypass: Bypass | None
    phase: int = 0
    inside: bool = False  # of a module that runs


class BufferLayers(NamedTuple):
    """The layers that write a buffer; outside of the blocks also the layers whose surrounding code reads it."""

    layers: set[int]
    read: set[int]


class Chain:
    """The layers of a model in the order in which they run.

    Args:
        model: wholly on the meta device, or wholly real.
        forward: runs the model on an example microbatch on the model's device, down to the loss.
        blocks: names or classes of the blocks; by default the children of a `Sequential`, or the repeated blocks.
        device: device of microbatches, if the model or a part of it is on meta ([Note: probing without weights]).

    Attributes:
        model: as given.
        layers: prefix, blocks, suffix.
        frames: the modules around blocks, whose forwards run on every stage.
        written: the buffers (module, name) that the forward of the example wrote.
        crossing: values beside the activation that later layers read.

    Raises:
        ModelError: the model is no chain, with the names of what breaks it.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[], Any],
        blocks: Sequence[str] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        _refuse_mixture(model)
        self.model, self._device = model, device
        found = _blocks(model, blocks)
        self._passage: _Passage | None = None
        self._probe: Probe | None = None
        self._overwritten: set[int] = set()
        inside = {module for block in found for module in block.modules()}
        frames = {module for module in model.modules() if module not in inside and inside & set(module.modules())}
        self._number_of: dict[nn.Module, int] = dict.fromkeys(found, -1)
        self._gates = [Gate(self.enter, self._paths[block], block) for block in found]
        around = [m for m in model.modules() if m not in inside and m not in frames and _gated(m)]
        self._gates += [Gate(self.enter, self._paths[module], module) for module in around]
        self._learned = {module for gate in self._gates if gate.learned for module in gate.module.modules()}
        self.frames = frames
        self.placeholders = Placeholders()
        self.crossing = Crossing()
        self.written: dict[tuple[nn.Module, str], BufferLayers] = {}
        try:
            self.layers = self._find_layers(model, frames, forward, device)
        except BaseException:
            for gate in self._gates:
                gate.remove()
            raise
        places = [(m, layer.number) for layer in self.layers for top in layer.modules for m in top.modules()]
        self._first_layer = dict(reversed(places))

    @property
    def everywhere(self) -> set[nn.Module]:
        """The modules that run on every stage: frames, and those whose output depends on the batch alone."""
        return set(self._paths) - self._learned - {gate.module for gate in self._gates if gate.learned}

    def layer_of_buffer(self, module: nn.Module, name: str) -> int:
        """The layer to which a buffer belongs: the last that writes it, else the first that runs its module."""
        written = self.written.get((module, name))
        return max((written and written.layers) or {self._first_layer.get(module, 0)})

    def place(self, layer: int) -> str:
        """The place of the code outside of the blocks in a layer, as text, such as 'before the blocks'."""
        if layer in (0, self.blocks + 1):
            return "after the blocks" if layer else "before the blocks"
        return f"after {self.layers[layer].name!r}"

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model."""
        return list(self._paths)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.layers) - 2

    def run(
        self,
        first: int,
        last: int,
        forward: Callable[[], Any],
        hidden: Tensor | None = None,
        entered: Entered | None = None,
        bypass: Bypass | None = None,
    ) -> Any:
        """Run layers [first, last) of the model that `forward` calls, to the input of layer `last` or to the output.

        Args:
            hidden: the input of layer `first`; None at the start of the model.
            entered: called with the input of each of these layers but the first.
            bypass: values of earlier layers that these read; values of these layers are added.
        """
        if hidden is not None and first in self._overwritten:
            hidden = hidden.clone()  # a leaf of autograd, or a message, must not be written
        bypass = bypass or (Bypass() if self.crossing.groups else None)
        passage = self._passage = _Passage(first, last, hidden, entered, bypass)
        try:
            on_device = self.placeholders.on_device(self.model, self._device)
            with self._before_hooks(first, last), stand_in(self.frames, _is_absent), on_device:
                output = forward()
        except _Left as left:
            return left.hidden
        finally:
            self._passage = None
        if passage.phase < min(last, self.blocks + 1):
            raise ModelError(
                f"The forward ended before {self.layers[passage.phase + 1].name!r} ran, which runs in the example; all "
                f"blocks of a chain must run for every microbatch."
            )
        return output

    def boundary(self, layer: int, forward: Callable[[], Any], bypass: Bypass | None = None) -> Tensor:
        """A placeholder (shape and dtype) of a layer's input for the microbatch of `forward`.

        Args:
            bypass: gets placeholders for the values beside it.
        """
        hidden: Tensor = self.run_standing_in(layer, layer, forward, bypass)
        return hidden

    def run_standing_in(self, first: int, last: int, forward: Callable[[], Any], bypass: Bypass | None = None) -> Any:
        """As `run`, for the shapes of the outputs only: buffers and random numbers stay unchanged."""
        with torch.no_grad(), unchanged(self.model):
            return self.run(first, last, forward, bypass=bypass)

    def number(self, name: str) -> int:
        """The layer of a name.

        Raises:
            ModelError: there is no such layer.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer.number
        names = ", ".join(layer.name for layer in self.layers)
        raise ModelError(
            f"split names {name!r}, and the model has no layer {name!r} to cut before; its layers are {names}. "
            f"Name some of them."
        )

    def enter(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a gated module, for its caller: its own, or a placeholder."""
        if self._probe is not None:
            return self._probe.enter(gate, args, kwargs)
        passage = self._passage
        if passage is None:
            return gate.inner(*args, **kwargs)
        number = self._number_of.get(gate.module)
        if number is None:
            return self._call(passage, gate, args, kwargs, passage.phase if gate.learned else None)
        if number != passage.phase + 1:
            raise ModelError(
                f"{self.layers[number].name!r} ran after {self.layers[passage.phase].name!r}, which is not the order "
                f"of the example; the blocks of a chain must run in one order for every microbatch."
            )
        passage.phase = number
        if number == passage.last:
            raise _Left(activation_at((args, kwargs), gate.takes, gate))
        if number == passage.first and passage.hidden is not None:
            args, kwargs = with_activation((args, kwargs), gate.takes, passage.hidden)
        if passage.entered is not None and passage.first < number:
            passage.entered(number, activation_at((args, kwargs), gate.takes, gate))
        output = self._call(passage, gate, args, kwargs, number)
        return output if number < self.blocks else self._after_blocks(passage, gate, output)

    def _call(self, passage: _Passage, gate: Gate, args: Any, kwargs: Any, layer: int | None) -> Any:
        """Run a module of a layer, or of all layers (None), or return its placeholder."""
        if passage.inside:
            return gate.inner(*args, **kwargs)
        number = 0 if passage.bypass is None else passage.bypass.call(gate.path)
        if layer is None or passage.first <= layer < passage.last:
            passage.inside = True
            try:
                output = gate.inner(*args, **kwargs)
            finally:
                passage.inside = False
            if passage.bypass is not None:
                passage.bypass.record(self.crossing, gate, number, output)
            return output
        output = self.placeholders.of(gate.module, gate.inner, args, kwargs, gate.overwritten)
        if passage.bypass is None:
            return tree_map(partial(unsent, path=gate.path), output)
        return passage.bypass.fill(self.crossing, gate, number, output)

    def _after_blocks(self, passage: _Passage, gate: Gate, output: Any) -> Any:
        """The last block's output for the code after the blocks."""
        passage.phase = self.blocks + 1
        if passage.last == passage.phase:
            raise _Left(activation_at(output, gate.returns, gate))
        if passage.first == passage.phase and passage.hidden is not None:
            return with_activation(output, gate.returns, passage.hidden)
        if passage.entered is not None:
            passage.entered(passage.phase, activation_at(output, gate.returns, gate))
        return output

    @contextmanager
    def _before_hooks(self, first: int, last: int) -> Iterator[None]:
        """Enter and leave blocks with full backward hooks before torch wraps their arguments.

        torch passes such a hook the gradient of the arguments as they are before the forward.

        Raises:
            ModelError: the last block has such a hook, and its output goes to another stage.
        """
        with ExitStack() as undo:
            for gate in (gate for gate in self._gates if gate.module._backward_hooks):
                number = self._number_of.get(gate.module)
                if number == self.blocks and self.blocks + 1 in (first, last) and torch.is_grad_enabled():
                    raise ModelError(
                        f"The block {gate.path!r} has a full backward hook, and the next stage has only what comes "
                        f"after the blocks. Cut before an earlier block (pipeline_parallel.split), or register the "
                        f"hook on a module inside of the block."
                    )
                if number in (first, last):
                    hook = partial(self._enter_early, gate, number == last)
                    handle = gate.module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                    undo.callback(handle.remove)
            yield

    def _enter_early(self, gate: Gate, leaves: bool, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if leaves:
            self.enter(gate, args, kwargs)
        passage = self._passage
        assert passage is not None
        hidden, passage.hidden = passage.hidden, None
        return (args, kwargs) if hidden is None else with_activation((args, kwargs), gate.takes, hidden)

    def sites(self, parameter: nn.Parameter) -> Iterator[tuple[nn.Module, str]]:
        """The sites of a parameter in the model: (module, name in it)."""
        for module in self._paths:
            for name, value in module._parameters.items():
                if value is parameter:
                    yield module, name

    def replace(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace the layers' parameters by ones of other shapes, which the modules hold already."""
        for layer in self.layers:
            layer.parameters = {name: new.get(parameter, parameter) for name, parameter in layer.parameters.items()}
        for gate in self._gates:
            if not set(new.values()).isdisjoint(gate.module.parameters()):
                self.placeholders.drop(gate.module)

    def path(self, module: nn.Module) -> str:
        """The module's name in the model."""
        return self._paths[module]

    def _find_layers(
        self, model: nn.Module, frames: set[nn.Module], forward: Callable[[], Any], device: torch.device | None
    ) -> list[Layer]:
        """Run the model once, find the layer of each module, and check that the layers are a chain."""
        apart = device is not None and all(parameter.is_meta for parameter in model.parameters())
        probe = self._probe = Probe(set(self._number_of), self.placeholders, device if apart else None)
        names = {parameter: name for name, parameter in model.named_parameters()}
        free = {p for frame in frames for p in frame.parameters(recurse=False)}
        for parameter in free:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise ModelError(
                    f"{names[parameter]!r} is {parameter.dtype} and a parameter of a module around the blocks. "
                    f"Autograd does not follow it, so the layer that uses it is not known; register it as a buffer."
                )
        with ExitStack() as stack:
            stack.enter_context(all_trainable(model))
            if apart and device is not None:
                stack.enter_context(without_weights(model, probe, self._learned, device))
            changed = stack.enter_context(unchanged(model))
            uses = BufferUses(module for module in self._paths if module not in self._learned)
            probe.on_phase = uses.look
            try:
                with uses, probe.origins, probe.leaving(model):
                    output = forward()
                uses.look(len(self._number_of) + 1)
            except (RuntimeError, NotImplementedError) as error:
                if not apart:
                    raise
                raise ModelError(
                    f"The model is on the meta device, and its forward could not be followed there ({error}); "
                    f"{_hint(model)}move what it computes from weights into modules that it calls, or build it on "
                    f"the CPU."
                ) from error
            finally:
                self._probe = None
            missing = [self._paths[block] for block in self._number_of if block not in probe.order]
            if missing:
                raise ModelError(
                    f"The block {missing[0]!r} did not run in a forward of the example; name the blocks of "
                    f"the chain with units=(...)."
                )
            layers = self._layers_of(probe, names)
            self._overwritten = {n + 1 for n, entered in enumerate(probe.entered) if entered._version}
            for gate, returned, version in probe.returned.values():
                gate.overwritten |= returned._version > version
            named = {self._paths[block] for block in self._number_of}
            self.crossing = Crossing.of(probe.origins, named, {gate.path for gate in self._gates if gate.overwritten})
            _check_chain(layers, probe, output, names, free, _hint(model))
        for module, name in changed:
            runs = {layer.number for layer in layers if _runs(module, layer)}
            site = module, name
            if module not in self._learned:
                runs = uses.phases.get(site, {0})
            self.written[site] = BufferLayers(runs, uses.read.get(site, set()))
        return layers

    def _layers_of(self, probe: Probe, names: dict[nn.Parameter, str]) -> list[Layer]:
        """The layers in the order in which they ran, each with its modules and their parameters."""
        layers = [Layer(0, PREFIX), *(Layer(n + 1, self._paths[b], [b]) for n, b in enumerate(probe.order))]
        layers.append(Layer(len(layers), SUFFIX))
        for number, block in enumerate(probe.order):
            self._number_of[block] = number + 1
        for gate in self._gates:
            for number in sorted(self._phases(gate, probe)) if gate.module not in probe.order else ():
                layers[number].modules.append(gate.module)
        for layer in layers:
            for module in layer.modules:
                deep = module in self._number_of
                for parameter in module.parameters(recurse=deep):
                    own = probe.stands_for.get(parameter, parameter)
                    layer.parameters[names[own]] = own
        return layers

    def _phases(self, gate: Gate, probe: Probe) -> set[int]:
        """The layers of a module; of a module that another reads without a call, the layers of the other."""
        around = (each.module for each in self._gates if gate.module in each.module.modules())
        return next((probe.phases[module] for module in (gate.module, *around) if module in probe.phases), {0})


class _Left(Exception):
    """Leaves the model's forward with the input of the first layer that is not run."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the rest of the model is on other ranks")
        self.hidden = hidden


def _check_chain(
    layers: list[Layer],
    probe: Probe,
    output: Any,
    names: dict[nn.Parameter, str],
    free: set[nn.Parameter],
    hint: str,
) -> None:
    """Refuse values that bypass the chain; enter the frames' own parameters into layers."""
    ends = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    for layer in layers:
        starts = ends if layer.number == len(layers) - 1 else [probe.marks[layer.number]]
        entrance = probe.marks[layer.number - 1] if layer.number else None
        passed = {mark: n for n, mark in enumerate(probe.marks) if mark is not None and mark not in starts}
        for node in _reach(starts, entrance):
            variable = getattr(node, "variable", None)
            variable = probe.stands_for.get(variable, variable)
            if node in passed:
                raise ModelError(
                    f"{layer.name!r} uses what entered {layers[passed[node] + 1].name!r}, past the layers between, so "
                    f"the model is no chain; {hint}name other blocks with units=(...), or use pipeline_parallel=1."
                )
            if variable in free:
                layer.parameters[names[variable]] = variable
            elif variable in names and names[variable] not in layer.parameters:
                raise ModelError(
                    f"{layer.name!r} uses something made with {names[variable]!r} that does not come through the "
                    f"layer before it, so the model is no chain; {hint}name other blocks with units=(...), or use "
                    f"pipeline_parallel=1."
                )
    for parameter in free - {p for layer in layers for p in layer.parameters.values()}:
        layers[0].parameters[names[parameter]] = parameter


def _hint(model: nn.Module) -> str:
    """The advice for mixtures of transformers, whose loss reads every block's router logits."""
    if not getattr(getattr(model, "config", None), "output_router_logits", False):
        return ""
    return "set output_router_logits=False in its configuration, which trains without the routers' auxiliary loss, "


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
            "The model has no repeated blocks to cut between; name its blocks with units=(...), or use "
            "pipeline_parallel=1."
        )
    return found


def _runs(module: nn.Module, layer: Layer) -> bool:
    return any(module in top.modules() for top in layer.modules)


def _gated(module: nn.Module) -> bool:
    return bool(module._parameters) or not module._modules


def _is_absent(parameter: nn.Parameter) -> bool:
    """Whether a parameter is of another chunk, whose values are not gathered."""
    return isinstance(parameter, Absent)
