"""Chain: a model cut into layers that can be run one range at a time, with the model's class untouched.

The layers are the modules before the blocks (the prefix), the blocks, and the modules after them (the suffix). Running
layers [first, last) calls the model's own forward on the whole microbatch: modules of earlier layers are skipped, the
received activation replaces the input of layer `first`, and the forward is left before layer `last`. So every stage
makes masks, positions and the like from the microbatch itself, and no parameter changes its name.

[Note: placeholders] A skipped module returns a placeholder: one NaN, expanded to the right shape. The shape comes from
the module's own forward on the meta device, once per input shape. A module between or around the blocks whose output
does not depend on parameters, such as a table of rotary angles, is never skipped: every stage needs its values.

[Note: what a chain is] Each layer uses results of earlier layers through the one activation that enters it, or through
several values, packed ([Note: carried values]). This is checked on the autograd graph of one forward: the path back
from the outputs of a layer to its inputs must meet only the layer's own parameters. Values without a gradient may
bypass it: they are sent beside it ([Note: values beside the activation]).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import ModelError
from zeroshard.pipeline.cut.bypass import Bypass, Crossing
from zeroshard.pipeline.cut.carried import Carried, Passing, packed
from zeroshard.pipeline.cut.check import GraphCheck, hint_of
from zeroshard.pipeline.cut.gates import Gate, activation_at, with_activation
from zeroshard.pipeline.cut.layers import (
    ALL_RUN,
    BufferLayers,
    Layer,
    blocks_of,
    is_absent,
    is_gated,
    not_run,
    refuse_mixture,
    runs_in,
)
from zeroshard.pipeline.cut.placeholders import Placeholders, stand_in, unsent, without_values
from zeroshard.pipeline.cut.probe import BufferUses, Probe, RunsTwice, all_trainable, unchanged, without_weights
from zeroshard.schedule import PipelineSchedule
from zeroshard.units.adapters import INSIDE

PREFIX, SUFFIX = "prefix", "suffix"
Entered = Callable[[int, Tensor], None]  # the number of a layer, and the activation that enters it


@dataclass(slots=True)
class _Passage:
    """One run of a range of layers: its input, and the number of the last block that ran."""

    first: int
    last: int
    hidden: Tensor | None
    entered: "Entered | None"
    bypass: Bypass | None
    by_example: bool
    passing: Passing | None = None  # carried values, in place of the one input
    phase: int = 0
    inside: bool = False  # of a module that runs
    calls: dict[nn.Module, int] = field(default_factory=partial(defaultdict, int))  # of blocks
    shown: Any = None  # the results of a module inside of one that is skipped

    def in_own_layers(self) -> bool:
        """Whether code of the layers that run, not of earlier ones, is under way."""
        return self.first <= self.phase < self.last

    def begin(self, phase: int) -> None:
        """Begin the code after so many blocks."""
        self.phase = phase
        if self.passing is not None:
            self.passing.phase = phase


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
        carried: values with a gradient that cross boundaries, if there are more than the activation.

    Raises:
        ModelError: a value cannot be sent from layer to layer, with the names of both.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[], Any],
        blocks: Sequence[str] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        refuse_mixture(model)
        self.model, self._device = model, device
        found = blocks_of(model, blocks)
        self._passage: _Passage | None = None
        self._probe: Probe | None = None
        self._overwritten: set[int] = set()
        inside = {module for block in found for module in block.modules()}
        frames = {module for module in model.modules() if module not in inside and inside & set(module.modules())}
        self._numbers: dict[nn.Module, list[int]] = {block: [] for block in found}  # of each call of a block
        self._gates = [Gate(self.enter, self._paths[block], block) for block in found]
        around = [m for m in model.modules() if m not in inside and m not in frames and is_gated(m)]
        self._gates += [Gate(self.enter, self._paths[module], module) for module in around]
        self._learned = {module for gate in self._gates if gate.learned for module in gate.module.modules()}
        self.frames = frames
        self.placeholders = Placeholders()
        self.crossing, self.carried = Crossing(), Carried()
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
        pieces: Sequence[int] = (),
        by_example: bool = False,
    ) -> Any:
        """Run layers [first, last) of the model that `forward` calls, to the input of layer `last` or to the output.

        Args:
            hidden: the input of layer `first`; None at the start of the model.
            pieces: its elements from each source, where there are several.
            entered: called with the input of each of these layers but the first.
            bypass: values of earlier layers that these read; values of these layers are added.
            by_example: whether the example's values stand for those of earlier layers.
        """
        if hidden is not None and first in self._overwritten and not self.carried.needed:
            hidden = hidden.clone()  # a leaf of autograd, or a message, must not be written
        bypass = bypass or (Bypass() if self.crossing.groups or self.carried.needed else None)
        passage = self._passage = _Passage(first, last, hidden, entered, bypass, by_example)
        if self.carried.needed:
            passage.passing, passage.hidden = Passing(self.carried, first, hidden, last, pieces), None
        try:
            hooked = any(gate.module._backward_hooks for gate in self._gates)
            early = self._before_hooks(first, last) if hooked else nullcontext()
            real = self.placeholders.on_device(self.model, self._device)
            with early, stand_in(self.frames, is_absent), real, passage.passing or nullcontext():
                output = forward()
        except _Left as left:
            return left.args[0]
        finally:
            self._passage = None
        if passage.phase < min(last, self.blocks + 1):
            raise ModelError(
                f"The forward ended before {self.layers[passage.phase + 1].name!r} ran, which runs in the example; "
                f"{ALL_RUN}."
            )
        return output

    def route(self, firsts: Sequence[int], pipeline: PipelineSchedule) -> PipelineSchedule:
        """Choose the messages of all values; returns the schedule with those that pass over chunks."""
        stages, most = pipeline.layout.stages, pipeline.farthest
        learned = self.carried.route(firsts, stages, most)
        others = set(self.crossing.route(firsts, stages, self.carried.reach if self.carried.needed else (), most))
        one_way = tuple(sorted(others.difference(learned)))
        return replace(pipeline, skips=tuple(sorted(others.union(learned))), one_way=one_way)

    def boundary(self, layer: int, forward: Callable[[], Any]) -> Tensor:
        """A placeholder (shape and dtype) of a layer's input for the microbatch of `forward`."""
        found = self.run_standing_in(layer, layer, forward)
        return found if isinstance(found, Tensor) else packed([*found.values()])

    def run_standing_in(self, first: int, last: int, forward: Callable[[], Any], bypass: Bypass | None = None) -> Any:
        """As `run`, for the shapes of the outputs only: buffers and random numbers stay unchanged.

        Of no layers, the placeholder of the activation that enters them, or those of the values, by key.
        """
        with torch.no_grad(), unchanged(self.model), without_values():
            return self.run(first, last, forward, bypass=bypass, by_example=True)

    def number(self, name: str) -> int:
        """The layer of a name.

        Raises:
            ModelError: there is no such layer.
        """
        paths = [layer.name.removeprefix(INSIDE) for layer in self.layers]  # a model of peft has those of its base
        if (path := name.removeprefix(INSIDE)) in paths:
            return paths.index(path)
        raise ModelError(
            f"split names {name!r}, and the model has no layer {name!r} to cut before; its layers are "
            f"{', '.join(paths)}. Name some of them."
        )

    def enter(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a gated module, for its caller: its own, or a placeholder."""
        if self._probe is not None:
            return self._probe.enter(gate, args, kwargs)
        passage = self._passage
        if passage is None:
            return gate.inner(*args, **kwargs)
        if passage.passing is None:
            return self._enter(passage, gate, args, kwargs)
        with passage.passing.inside():
            return self._enter(passage, gate, args, kwargs)

    def _enter(self, passage: _Passage, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        numbers = self._numbers.get(gate.module)
        if numbers is None or passage.inside:
            return self._call(passage, gate, args, kwargs, passage.phase if gate.learned else None)
        number = numbers[min(passage.calls[gate.module], len(numbers) - 1)]
        passage.calls[gate.module] += 1
        if number != passage.phase + 1:
            raise ModelError(
                f"{self.layers[number].name!r} ran after {self.layers[passage.phase].name!r}, which is not the order "
                f"of the example; {ALL_RUN}."
            )
        passage.begin(number)
        if number == passage.last:
            raise _Left(self._leaving(passage, (args, kwargs), gate.takes, gate))
        args, kwargs = self._entering(passage, (args, kwargs), gate.takes, gate)
        output = self._call(passage, gate, args, kwargs, number)
        if number < (blocks := len(self.layers) - 2):
            return output
        passage.begin(blocks + 1)
        if passage.last == passage.phase:
            raise _Left(self._leaving(passage, output, gate.returns, gate))
        return self._entering(passage, output, gate.returns, gate)

    def _leaving(self, passage: _Passage, tree: Any, place: int, gate: Gate) -> Any:
        """The input of the first layer that does not run."""
        return activation_at(tree, place, gate) if passage.passing is None else passage.passing.leave(self.layers)

    def _entering(self, passage: _Passage, tree: Any, place: int, gate: Gate) -> Any:
        """The arguments of a block, or the last block's output for the code after the blocks."""
        if passage.phase == passage.first and passage.passing is not None:
            passage.passing.check(self.layers)
        if passage.phase == passage.first and passage.hidden is not None:
            return with_activation(tree, place, passage.hidden)
        if passage.entered is not None and passage.first < passage.phase:
            passage.entered(passage.phase, activation_at(tree, place, gate))
        return tree

    def _call(self, passage: _Passage, gate: Gate, args: Any, kwargs: Any, layer: int | None) -> Any:
        """Run a module of a layer, or of all layers (None), or return its placeholder."""
        if passage.inside:
            return gate.inner(*args, **kwargs)
        number = 0 if passage.bypass is None else passage.bypass.call(gate.path)
        if layer is None or passage.first <= layer < passage.last:
            if passage.passing is not None and layer is not None:
                passage.passing.takes((args, kwargs))
            passage.inside = True
            try:
                output = gate.inner(*args, **kwargs)
            finally:
                passage.inside = False
            return output if layer is None or passage.bypass is None else self._own(passage, gate, number, output)
        output = self.placeholders.of(gate.module, gate.inner, args, kwargs, gate.overwritten)
        for inner, shown in self.placeholders.inside(gate.module, args, kwargs) if self.placeholders.inner else ():
            assert passage.bypass is not None
            passage.shown = self._stand_in(passage, inner, passage.bypass.call(inner.path), shown)
            inner.module()  # for its hooks
        return self._stand_in(passage, gate, number, output)

    def _own(self, passage: _Passage, gate: Gate, number: int, output: Any) -> Any:
        """An output of this run, noted for other stages."""
        assert passage.bypass is not None
        passage.bypass.record(self.crossing, gate, number, output)
        return output if passage.passing is None else passage.passing.returned(gate.path, number, output)

    def _stand_in(self, passage: _Passage, gate: Gate, number: int, output: Any) -> Any:
        """A placeholder with the values that this stage has received."""
        if passage.bypass is None and isinstance(output, Tensor) and output.is_floating_point():
            return output  # of most blocks: it is NaN
        absent = partial(unsent, path=gate.path, in_own_layers=passage.in_own_layers)
        known = passage.bypass or Bypass()
        output = known.fill(self.crossing, gate, number, output, passage.by_example, absent)
        if passage.passing is None:
            return output
        output = passage.passing.returned(gate.path, number, output)
        known.known |= {key: value.detach() for key, value in passage.passing.received.items()}
        return output

    def _enter_inner(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a module inside of a gated one, which the code around the blocks takes out by a hook."""
        passage = self._passage
        if passage is not None and passage.shown is not None:
            shown, passage.shown = passage.shown, None
            return shown
        output = gate.inner(*args, **kwargs)
        if self.placeholders.note(gate, output) or passage is None or passage.passing is None:
            return output
        assert passage.bypass is not None
        return self._own(passage, gate, passage.bypass.call(gate.path), output)

    @contextmanager
    def _before_hooks(self, first: int, last: int) -> Iterator[None]:
        """Enter and leave blocks with full backward hooks before torch wraps their arguments.

        torch passes such a hook the gradient of the arguments as they are before the forward.
        """
        with ExitStack() as undo:
            for gate in (gate for gate in self._gates if gate.module._backward_hooks):
                number = next(iter(self._numbers.get(gate.module, ())), None)
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
        names = {parameter: name for name, parameter in model.named_parameters()}
        free = {p for frame in frames for p in frame.parameters(recurse=False)}
        for parameter in free:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise ModelError(
                    f"{names[parameter]!r} is {parameter.dtype} and a parameter of a module around the blocks. "
                    f"Autograd does not follow it, so the layer that uses it is not known; register it as a buffer."
                )
        where = device if apart else None
        try:
            return self._probed(forward, names, free, where, len(self._numbers))
        except RunsTwice:
            with ExitStack() as stack:
                counted, _ = self._run_probe(stack, forward, where, math.inf)
            return self._probed(forward, names, free, where, len(counted.order))

    def _probed(
        self,
        forward: Callable[[], Any],
        names: dict[nn.Parameter, str],
        free: set[nn.Parameter],
        device: torch.device | None,
        calls: int,
    ) -> list[Layer]:
        """The layers of one forward with so many calls of blocks, and the values that cross between them."""
        with ExitStack() as stack:
            probe, output = self._run_probe(stack, forward, device, calls)
            missing = [self._paths[block] for block in self._numbers if block not in probe.order]
            if missing:
                raise not_run(missing[0])
            layers = self._layers_of(probe, names)
            self._overwritten = {n + 1 for n, entered in enumerate(probe.entered) if entered._version}
            for gate, returned, version in probe.returned.values():
                gate.overwritten |= returned._version > version
            overwritten = {gate.path for gate in self._gates if gate.overwritten}
            self.crossing = Crossing.of(probe.origins, len(layers) - 1, overwritten)
            by_key = probe.recomputed or calls > len(self._numbers)
            self.carried = probe.learned.carried(len(layers) - 1, by_key)
            self.carried.written |= {key for key in self.carried.reach if key.path in overwritten}
            self.carried.written.update(*(probe.learned.entered.get(layer, ()) for layer in self._overwritten))
            GraphCheck(layers, probe, names, free, hint_of(self.model)).run(output, self.carried)
            self.carried.keep(probe.origins.reads, len(layers) - 1)
        self._gate_inner(probe)
        for site in probe.uses.changed:
            module = site[0]
            where = {layer.number for layer in layers if runs_in(module, layer)}
            if module not in self._learned:
                where = probe.uses.phases.get(site, {0})
            self.written[site] = BufferLayers(where, probe.uses.read.get(site, set()))
        return layers

    def _gate_inner(self, probe: Probe) -> None:
        """Put gates around modules inside of others whose results cross boundaries."""
        modules = {path: module for module, path in self._paths.items()}
        carried = self.carried.reach if self.carried.needed else ()
        for path in dict.fromkeys(key.path for key in carried if key.path in probe.learned.outer):
            self.placeholders.inner[modules[path]] = Gate(self._enter_inner, path, modules[path])
        self._gates += self.placeholders.inner.values()

    def _run_probe(
        self, stack: ExitStack, forward: Callable[[], Any], device: torch.device | None, calls: float
    ) -> tuple[Probe, Any]:
        """One forward under a probe, and its output; `stack` restores the model."""
        probe = self._probe = Probe(set(self._numbers), calls, self.placeholders, device)
        stack.enter_context(all_trainable(self.model))
        if device is not None:
            stack.enter_context(without_weights(self.model, probe, self._learned, device))
        changed = stack.enter_context(unchanged(self.model))
        probe.uses = BufferUses((module for module in self._paths if module not in self._learned), changed)
        try:
            with probe.uses, probe.origins, probe.listening(self.model, self._paths), probe.learned:
                output = forward()
            probe.uses.look(len(probe.order) + 1)
        except (RuntimeError, NotImplementedError) as error:
            if device is None:
                raise
            raise ModelError(
                f"The model is on the meta device, and its forward could not be followed there ({error}); "
                f"{hint_of(self.model)}move what it computes from weights into modules that it calls, or build it on "
                f"the CPU."
            ) from error
        finally:
            self._probe = None
        return probe, output

    def _layers_of(self, probe: Probe, names: dict[nn.Parameter, str]) -> list[Layer]:
        """The layers in the order in which they ran, each with its modules and their parameters."""
        layers = [Layer(0, PREFIX)]
        self._numbers = {block: [] for block in self._numbers}
        for number, block in enumerate(probe.order, 1):
            self._numbers[block].append(number)
            call = len(self._numbers[block])
            layers.append(Layer(number, self._paths[block] + (f"#{call}" if call > 1 else ""), [block]))
        layers.append(Layer(len(layers), SUFFIX))
        for gate in self._gates:
            for number in sorted(self._phases(gate, probe)) if gate.module not in probe.order else ():
                layers[number].modules.append(gate.module)
        for layer in layers:
            for module in layer.modules:
                deep = module in self._numbers
                for parameter in module.parameters(recurse=deep):
                    own = probe.stands_for.get(parameter, parameter)
                    layer.parameters[names[own]] = own
        return layers

    def _phases(self, gate: Gate, probe: Probe) -> set[int]:
        """The layers of a module; of a module that another reads without a call, the layers of the other."""
        around = (each.module for each in self._gates if gate.module in each.module.modules())
        return next((probe.phases[module] for module in (gate.module, *around) if module in probe.phases), {0})


class _Left(Exception):  # leaves the model's forward; its argument is the input of the first layer that is not run
    expected = True  # no error after which a rank goes on
