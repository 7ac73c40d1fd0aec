"""Engines under a LightningModule: one of the whole module, or one of the parts that each optimizer trains.

[Note: an optimizer for each part] Lightning's manual optimization may have several optimizers, such as a GAN's. Each
gets an engine over the largest submodules whose parameters are all its own. Their forwards run in the place where the
LightningModule calls them, and gather what they need. A backward is torch's own: each engine receives the gradients of
its parameters, whatever loss they come from, and `zero_grad` of an optimizer discards those of its engine.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.comm.mesh import Mesh
from zeroshard.engine import Engine
from zeroshard.errors import OptimizerError, PlanError
from zeroshard.interop.loops import absent_weights
from zeroshard.plan import Plan
from zeroshard.precision.cast import Precision
from zeroshard.units.materialise import take_from_rank_0

PREFIX = "module."


class WholeModule:
    """One engine of a LightningModule, whose steps are forwards of the engine's model.

    Attributes:
        engines: that one.
    """

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer, plan: Plan, mesh: Mesh) -> None:
        self.engines = [Engine(_Steps(module), optimizer, plan, mesh=mesh)]
        self._module = module
        if not module.automatic_optimization:
            self._send_forwards()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """`training_step`; one that optimizes by itself is no forward, and its `self(...)` is."""
        if not self._module.automatic_optimization:
            return self._module.training_step(*args, **kwargs)
        return self.run("training_step", *args, **kwargs)

    def run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """A step of the module by name."""
        return self.engines[0](step, *args, **kwargs)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of the loss, with arguments of `Tensor.backward` in manual optimization.

        Raises:
            PlanError: such arguments under a loss scale.
        """
        given = [*map(str, args), *kwargs]
        if not given:
            self.engines[0].backward(loss)
            return
        _refuse_scaling(
            self.engines[0].plan, f"manual_backward({', '.join(given)})", "Call manual_backward(loss) alone"
        )
        loss.backward(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The module's whole state dict on every rank; a collective call."""
        return {name.removeprefix(PREFIX): value for name, value in self.engines[0].state_dict().items()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint; a collective call."""
        self.engines[0].save(folder, wait=True)

    def load(self, folder: Path) -> None:
        """Load one; a collective call."""
        self.engines[0].load(folder)

    def load_rest(self, state: Mapping[str, Any]) -> None:
        """Nothing: the engine has all."""

    def _send_forwards(self) -> None:
        """Send `self(...)` of a module with manual optimization through the engine's forward."""
        own, engine, within = self._module.forward, self.engines[0], False

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal within
            if within:
                return own(*args, **kwargs)
            within = True
            try:
                return engine("__call__", *args, **kwargs)
            finally:
                within = False

        self._module.forward = forward


class PartsOfModule:
    """An engine for each of several optimizers of a LightningModule ([Note: an optimizer for each part]).

    Parameters of no optimizer stay the module's own: they start with rank 0's values, on this rank's device.

    Attributes:
        engines: in the order of the optimizers.

    Raises:
        OptimizerError: a parameter is in two optimizers; or it is gathered with a module that has parameters of
            several. PlanError: the plan scales losses.
    """

    def __init__(self, module: Any, optimizers: Sequence[torch.optim.Optimizer], plan: Plan, mesh: Mesh) -> None:
        found = f"{len(optimizers)} optimizers from configure_optimizers"
        _refuse_scaling(plan, found, "Put the parameters into groups of one optimizer")
        self._module = module
        self._divided = _Divided(module, optimizers)
        self._divided.check(plan)
        self.engines: list[Engine] = []
        self._prefixes: list[str] = []
        precision = Precision.named(plan.precision)
        self._divided.place_rest(mesh.device, precision)
        for number, optimizer in enumerate(optimizers):
            model, prefix = self._divided.model_of(number, precision)
            self.engines.append(Engine(model, optimizer, plan, mesh=mesh))
            self._prefixes.append(prefix)
        take_from_rank_0(_tree(self._divided.rest), self.engines[0].world)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """`training_step`, in which the parts are called."""
        return self._module.training_step(*args, **kwargs)

    def run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """A step of the module by name."""
        return getattr(self._module, step)(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of the loss to those of each engine that it reaches."""
        loss.backward(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The module's whole state dict on every rank; a collective call."""
        found = dict(_tree(self._divided.rest).state_dict())
        for engine, prefix in zip(self.engines, self._prefixes, strict=True):
            found |= {f"{prefix}{name}": value for name, value in engine.state_dict().items()}
        return found | self._divided.second_names(found)

    def save(self, folder: Path) -> None:
        """Write a checkpoint of each engine; a collective call."""
        for number, engine in enumerate(self.engines):
            engine.save(folder / f"optimizer-{number}", wait=True)

    def load(self, folder: Path) -> None:
        """Load those; a collective call."""
        for number, engine in enumerate(self.engines):
            engine.load(folder / f"optimizer-{number}")

    def load_rest(self, state: Mapping[str, Any]) -> None:
        """Load parameters and buffers of no engine from the module's state dict."""
        rest = _tree(self._divided.rest)
        rest.load_state_dict({name: state[name] for name in rest.state_dict() if name in state}, strict=False)


class _Divided:
    """A module divided among optimizers.

    Attributes:
        members: for each optimizer, modules and parameters by path.
        rest: modules, parameters and buffers without any optimizer, by path.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._module = module
        self._owner: dict[int, int] = {}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for number, optimizer in enumerate(optimizers):
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                other = self._owner.setdefault(id(parameter), number)
                if other != number:
                    raise OptimizerError(
                        f"{names.get(id(parameter), 'A parameter')!r} is in the optimizers {other} and {number} of "
                        f"configure_optimizers, and each gets an engine with the parameters that it alone updates. "
                        f"Leave it out of one of them."
                    )
        self.members: list[dict[str, nn.Module | nn.Parameter]] = [{} for _ in optimizers]
        self._holders: list[dict[str, nn.Module]] = [{} for _ in optimizers]  # of members that are parameters
        self.rest: dict[str, Any] = {}
        self._seen: dict[int, str] = {}
        self._again: dict[str, str] = {}  # further paths of a module or parameter, with the first
        self._divide(module, "")

    def _divide(self, module: nn.Module, prefix: str) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and self._first(parameter, prefix + name):
                number = self._owner.get(id(parameter))
                if number is None:
                    self.rest[prefix + name] = parameter
                else:
                    self.members[number][prefix + name] = parameter
                    self._holders[number][prefix + name] = module
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                self.rest[prefix + name] = buffer
        for name, child in module._modules.items():
            if child is None or not self._first(child, prefix + name):
                continue
            numbers = {self._owner.get(id(parameter)) for parameter in child.parameters()} - {None}
            if not numbers:
                self.rest[prefix + name] = child
            elif len(numbers) == 1:
                self.members[numbers.pop() or 0][prefix + name] = child
            else:
                self._divide(child, f"{prefix}{name}.")

    def _first(self, item: nn.Module | nn.Parameter, path: str) -> bool:
        first = self._seen.setdefault(id(item), path)
        if first != path:
            self._again[path] = first
        return first == path

    def check(self, plan: Plan) -> None:
        """Refuse members that are parameters where they are gathered with their module.

        Raises:
            OptimizerError: with the way out.
        """
        found = next((path for holders in self._holders for path in holders), None)
        if found is not None and absent_weights(plan):
            kind = type(next(holders[found] for holders in self._holders if found in holders)).__name__
            raise OptimizerError(
                f"{found!r} belongs to a {kind} that has parameters of several optimizers or of none, and this plan "
                f"gathers parameters for the forward of a module. Put it into a module of its own, put all parameters "
                f"of the {kind} into one optimizer, or take zero=2 without offloaded parameters."
            )

    def model_of(self, number: int, precision: Precision) -> tuple[nn.Module, str]:
        """The model of an optimizer's engine, and the path of its names in the module."""
        members = self.members[number]
        if not members:
            raise OptimizerError(
                f"Optimizer {number} of configure_optimizers has no parameter of the module. Leave it out, or register "
                f"the module that it trains as an attribute of the LightningModule."
            )
        (path, first), *others = members.items()
        if not others and isinstance(first, nn.Module):
            return first, f"{path}."
        called = {id(each): each for each in members.values() if isinstance(each, nn.Module)}
        for each in (called | {id(holder): holder for holder in self._holders[number].values()}).values():
            _cast_inputs(each, precision)
        return _tree(members), ""

    def place_rest(self, device: torch.device, precision: Precision) -> None:
        """Bring the rest, and buffers that are not saved, to a device; beside 16-bit parts it takes inputs in fp32."""
        dtype = precision.compute
        whole = Precision(None if dtype is None else torch.float32)
        for item in self.rest.values():
            if isinstance(item, nn.Module):
                item.to(device)
                _cast_inputs(item, whole)
            elif isinstance(item, nn.Parameter):
                item.data = item.data.to(device)
        kept = {id(each) for members in self.members for member in members.values() for each in _modules(member)}
        for module in self._module.modules():
            for name, buffer in module._buffers.items() if id(module) not in kept else ():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)
                    path = next((path for path, item in self.rest.items() if item is buffer), None)
                    if path is not None:
                        self.rest[path] = module._buffers[name]

    def second_names(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of modules and parameters under their further paths."""
        return {
            path + name.removeprefix(first): value
            for path, first in self._again.items()
            for name, value in state.items()
            if name == first or name.startswith(f"{first}.")
        }


class _Steps(nn.Module):
    """The LightningModule as a model whose forward runs one of its steps by name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, step)(*args, **kwargs)


def _tree(items: Mapping[str, Any]) -> nn.Module:
    """Modules, parameters and buffers under a new root, with the same names."""
    root = nn.Module()
    for path, item in items.items():
        above, (*parents, name) = root, path.split(".")
        for parent in parents:
            if parent not in above._modules:
                above.add_module(parent, nn.Module())
            above = above.get_submodule(parent)
        if isinstance(item, nn.Module):
            above.add_module(name, item)
        elif isinstance(item, nn.Parameter):
            above.register_parameter(name, item)
        else:
            above.register_buffer(name, item)
    return root


def _refuse_scaling(plan: Plan, found: str, way_out: str) -> None:
    """Refuse plans that scale losses, for one engine and in its own backward.

    Raises:
        PlanError: the plan is one.
    """
    refused = plan.scales_loss
    if refused:
        raise PlanError(
            f"precision={plan.precision!r} scales the losses of one optimizer, in the engine's own backward, and there "
            f"is {found}. {way_out}, or take precision='bf16', which needs no scale."
        )


def _cast_inputs(module: nn.Module, precision: Precision) -> None:
    """Make a module with parameters take its inputs in the dtype of computation."""
    dtype, parameter = precision.compute, next(module.parameters(), None)
    if dtype is not None and parameter is not None:
        module.register_forward_pre_hook(lambda _, *given: precision.cast_inputs(given), with_kwargs=True)


def _modules(member: nn.Module | nn.Parameter) -> Iterator[nn.Module]:
    return member.modules() if isinstance(member, nn.Module) else iter(())


@contextmanager
def gathered(engines: Sequence[Engine]) -> Iterator[None]:
    """Whole parameters of all engines inside; a collective call."""
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.gathered())
        yield
