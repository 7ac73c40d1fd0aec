"""Placeholders for the outputs of modules whose parameters are on other ranks: shape and dtype, no values."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from zeroshard.errors import ModelError, ZeroshardError
from zeroshard.pipeline.cut.gates import Gate
from zeroshard.pipeline.cut.origins import INTO_PYTHON, reads_values, storage_of, tensors_among
from zeroshard.units.forwards import instead

HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # called with a module's input and output


class Placeholders:
    """A cache of output shapes by module and input shapes.

    Attributes:
        inner: gates of modules inside of others, whose shapes are known with theirs.
        seen: paths of modules inside of the one that runs, with the shapes of what they returned.
    """

    def __init__(self) -> None:
        self.inner: dict[nn.Module, Gate] = {}
        self.seen: list[tuple[str, _Flat]] = []
        self._inside: list[tuple[Gate, _Flat]] | None = None  # calls of `inner` in a forward on meta
        self._known: dict[Any, tuple[_Flat, list[tuple[Gate, _Flat]]]] = {}
        self._recorded: dict[Any, tuple[_Flat, _Flat, list[tuple[str, _Flat]]]] = {}  # arguments, output, calls inside
        self._made: dict[Any, Tensor] = {}  # of modules with one tensor as argument and as output
        self._on_meta: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] | None = None
        self._cast = False  # parameters have other dtypes than in the recorded calls

    def record(self, module: nn.Module, args: Any, kwargs: Any, output: Any, began: int = 0) -> None:
        """Record the output shapes of a real call, which need not be looked for on the meta device.

        Args:
            began: the length of `seen` before the call.
        """
        self._recorded[_key(module, args, kwargs)] = shapes_of((args, kwargs)), shapes_of(output), self.seen[began:]
        del self.seen[began:]

    def forget(self, cast: bool = False) -> None:
        """Clear the cache: devices of parameters have changed, and with `cast` their dtypes."""
        self._known.clear()
        self._made.clear()
        self._on_meta, self._cast = None, self._cast or cast

    def drop(self, module: nn.Module) -> None:
        """Drop a module's recorded shapes, which are out of date."""
        self._recorded = {key: shapes for key, shapes in self._recorded.items() if key[0] != id(module)}

    @contextmanager
    def on_device(self, model: nn.Module, device: torch.device | None) -> Iterator[None]:
        """Replace parameters on meta by NaN on `device` inside: code around modules may read a parameter's device."""
        if self._on_meta is None:
            sites = ((m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None)
            self._on_meta = [
                (m, name, p, _absent(p, device)) for m, name, p in sites if device is not None and p.is_meta
            ]
        sites_now = [site for site in self._on_meta if site[0]._parameters.get(site[1]) is site[2]]
        for module, name, _, absent in sites_now:
            module._parameters[name] = absent
        try:
            yield
        finally:
            for module, name, parameter, _ in sites_now:
                module._parameters[name] = parameter

    def note(self, gate: Gate, output: Any) -> bool:
        """Whether only shapes are looked for; then notes those of a module inside of another."""
        if self._inside is not None:
            self._inside.append((gate, shapes_of(output)))
        return self._inside is not None

    def of(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, writable: bool = False) -> Any:
        """A placeholder for the output of `forward(*args, **kwargs)`.

        Args:
            writable: give every element its own memory, for models that write into the output.

        Raises:
            ModelError: the module cannot run on the meta device, and no real call was recorded.
        """
        short = None
        if len(args) == 1 and type(args[0]) is Tensor and not kwargs and not writable:
            short = id(module), module.training, args[0].shape, args[0].dtype, args[0].device
            if (made := self._made.get(short)) is not None:
                return made.detach()
        key = _key(module, args, kwargs)
        if key not in self._known:
            self._known[key] = self._shapes(module, forward, key, args, kwargs)
        placeholder = _placeholder_tree(self._known[key][0], args, kwargs, writable)
        if short is not None and _is_constant(placeholder):
            self._made[short] = placeholder
        return placeholder

    def inside(self, module: nn.Module, args: Any, kwargs: Any) -> list[tuple[Gate, Any]]:
        """The calls of `inner` modules in a forward that `of` has followed, with placeholders for their outputs."""
        calls = self._known[_key(module, args, kwargs)][1] if self.inner else []
        return [(inner, _placeholder_tree(flat, args, kwargs, writable=False)) for inner, flat in calls]

    def _shapes(
        self, module: nn.Module, forward: Callable[..., Any], key: Any, args: Any, kwargs: Any
    ) -> tuple["_Flat", list[tuple[Gate, "_Flat"]]]:
        inside = set(self.inner).intersection(module.modules())
        if key in self._recorded and not self._cast and not inside:
            return self._recorded[key][1], []

        def to_meta(leaf: Any) -> Any:
            with torch._C.DisableTorchFunctionSubclass():  # the values of a parameter may be on other ranks
                return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf

        sites = ((path, name, held) for path, m in module.named_modules() for name, held in _tensors_of(m))
        state = {f"{path}.{name}" if path else name: held for path, name, held in sites}
        hooked = [module, *(each for each in module.modules() if each in self.inner)]  # their hooks run around the gate
        self._inside = []
        try:
            with without_hooks(hooked), instead(module, forward), torch.no_grad(), _AnyDtype():  # type: ignore[no-untyped-call]
                meta_args, meta_kwargs = tree_map(to_meta, (args, kwargs))
                tensors = tree_map(to_meta, state)  # one for each site: `tie_weights` would swap some sites twice
                output = functional_call(module, tensors, meta_args, meta_kwargs, tie_weights=False)
            return shapes_of(output), self._inside
        except Exception as error:
            gates = {gate.path: gate for gate in self.inner.values()}
            if key in self._recorded:
                _, outputs, calls = self._recorded[key]
                return outputs, [(gates[path], flat) for path, flat in calls if path in gates]
            recorded = {} if inside else self._recorded
            shapes, structure = shapes_of((args, kwargs))
            for (one, *_), ((inputs, spec), outputs, _) in recorded.items():
                if one == id(module) and spec == structure:
                    alike = _alike(inputs, outputs[0], shapes)
                    if alike is not None:
                        return (alike, outputs[1]), []
            raise ModelError(
                f"The shape of what {type(module).__name__} returns cannot be found without computing it "
                f"({error}); give every microbatch the shape of the example, or pad the last batch."
            ) from error
        finally:
            self._inside = None


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and buffers."""
    named = (*module._parameters.items(), *module._buffers.items())
    return ((name, held) for name, held in named if held is not None)


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Call no hook of these modules' forwards inside."""
    hooks = [(module, name, vars(module)[name]) for module in modules for name in HOOKS]
    for module, name, _ in hooks:
        vars(module)[name] = OrderedDict()
    try:
        yield
    finally:
        for module, name, found in hooks:
            vars(module)[name] = found


@contextmanager
def without_values() -> Iterator[None]:
    """Name the cause of an error in the model's own code, which has placeholders inside.

    Raises:
        ModelError: the code around the blocks needs values.
    """
    try:
        yield
    except ZeroshardError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ModelError(
            f"The code around the blocks fails where it has the shapes of what the blocks return, and no values "
            f"({said}), as on a stage without them. Move what it does with values into a module that it calls, or use "
            f"pipeline_parallel=1."
        ) from error


class _AnyDtype(TorchDispatchMode):
    """A mode that gives grouped products a shape on meta in every dtype; torch has it for bf16 only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, grouped products on meta by `_grouped_mm`."""
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            return _grouped_mm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _grouped_mm(
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """An empty meta tensor in the shape of grouped products: groups of rows, of columns, or of the summed dimension."""
    shape: tuple[int, ...] = one.shape[-2], other.shape[-1]
    if one.dim() == other.dim() == 2:
        assert offs is not None
        shape = len(offs), *shape
    elif one.dim() == other.dim() == 3:
        shape = len(one), *shape
    return torch.empty(shape, dtype=out_dtype or one.dtype, device="meta")


_Flat = tuple[list[Any], Any]  # leaves and TreeSpec


@dataclass(frozen=True, slots=True)
class _Shape:
    """Shape and dtype of an output."""

    shape: torch.Size
    dtype: torch.dtype


def _alike(inputs: list[Any], outputs: list[Any], now: list[Any]) -> list[Any] | None:
    """The outputs for the inputs `now`, if each returned tensor had shape and dtype of one input; else None."""
    found = []
    for output in outputs:
        same = {new for old, new in zip(inputs, now, strict=True) if isinstance(output, _Shape) and old == output}
        if isinstance(output, _Shape) and len(same) != 1:
            return None
        found.append(same.pop() if same else output)
    return found


def shapes_of(output: Any) -> "_Flat":
    """The shapes and dtypes of an output's tensors, among its other leaves, and its structure."""
    return tree_flatten(tree_map(_shape_of, output))


def _shape_of(leaf: Any) -> Any:
    return _Shape(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _placeholder(leaf: Any, device: torch.device | None, writable: bool) -> Any:
    if not isinstance(leaf, _Shape):
        return leaf
    value = math.nan if leaf.dtype.is_floating_point or leaf.dtype.is_complex else 0
    placeholder = torch.full((), value, device=device).to(leaf.dtype).expand(leaf.shape)
    return placeholder.clone(memory_format=torch.contiguous_format) if writable else placeholder


def _is_constant(placeholder: Any) -> bool:
    """Whether a placeholder may be used again: a tensor of some dimensions over one element, which none can write."""
    plain = type(placeholder) is Tensor and not placeholder.is_inference()
    return plain and placeholder.numel() > 1 and not any(placeholder.stride())


def _placeholder_tree(flat: _Flat, args: Any, kwargs: Any, writable: bool) -> Any:
    """Placeholders on the device of the arguments."""
    first = args[0] if args and isinstance(args[0], Tensor) else None
    given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)) if first is None else (first,)
    device = next((leaf.device for leaf in given), None)
    leaves, structure = flat
    found = [_placeholder(leaf, device, writable) for leaf in leaves]
    return found[0] if structure.is_leaf() else tree_unflatten(found, structure)


METADATA = {"__get__", "dim", "size", "stride", "numel", "element_size", "is_floating_point", "is_complex", "__len__"}
METADATA |= {"is_inference", "contiguous"}


class _Reads(TorchDispatchMode):
    """A mode that notes whether operators read the values of some tensors, as the probe notes it."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched, self.any = set(map(storage_of, tensors)), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        taken = tensors_among((args, kwargs)) if reads_values(func) else ()
        self.any |= any(storage_of(tensor) in self._watched for tensor in taken)
        return func(*args, **(kwargs or {}))


class Unsent(Tensor):
    """A placeholder for values that a stage does not get, since none of its layers read them in the example.

    The code of earlier layers may read them, and its results: integers are placeholders again, and floats NaN.
    """

    path: str
    in_own_layers: Callable[[], bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer functions of shape, dtype and device, those that read no values, and those of earlier layers.

        Raises:
            ModelError: a layer of the stage reads values, or Python does.
        """
        with torch._C.DisableTorchFunctionSubclass():
            one = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Unsent))
            name = getattr(func, "__name__", "")
            if name in METADATA:
                found = func(*args, **(kwargs or {}))
                return unsent(found, one.path, one.in_own_layers) if isinstance(found, Tensor) else found  # as of `.T`
            if one.in_own_layers():
                with _Reads(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Unsent)) as reads:
                    found = func(*args, **(kwargs or {}))
                if not reads.any and name not in INTO_PYTHON:
                    return found
            else:
                leaves, spec = tree_flatten(func(*args, **(kwargs or {})))
                if all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
                    return tree_unflatten([_made_of(one, leaf, args) for leaf in leaves], spec)
            raise ModelError(
                f"A later stage reads what {one.path!r} returned besides the activation, which none read in the "
                f"example, so it is not sent. Give Engine(..., example=...) a microbatch that takes the same way "
                f"through the model's code, or use pipeline_parallel=1."
            )


def unsent(leaf: Tensor, path: str, in_own_layers: Callable[[], bool]) -> Tensor:
    """A placeholder for a value that is not sent.

    Args:
        in_own_layers: whether code of the stage's own layers runs, which must not read it.
    """
    if type(leaf) is not Tensor:
        return leaf  # of a rehearsal
    absent = torch.Tensor._make_subclass(Unsent, leaf)
    absent.path, absent.in_own_layers = path, in_own_layers
    return absent


def _made_of(one: Unsent, leaf: Tensor | None, args: Any) -> Tensor | None:
    """The result of a function of a value that is not sent."""
    if leaf is None or isinstance(leaf, Unsent):
        return leaf
    if leaf.is_floating_point() or leaf.is_complex():
        with torch.no_grad():
            written = any(leaf is each for each in args)
            return leaf.fill_(math.nan) if written else torch.full_like(leaf, math.nan)
    return unsent(leaf, one.path, one.in_own_layers)


def _key(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return id(module), module.training, _described(args), _described(kwargs)


def _described(tree: Any) -> Any:
    """The structure, shapes, dtypes and plain values of a tree, many times faster than by torch's pytrees."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    if isinstance(tree, (int, float, str, bool, type(None))):
        return tree
    if kind is tuple or kind is list:
        return kind, *map(_described, tree)
    if kind is dict:
        return kind, *tree, *map(_described, tree.values())
    leaves, structure = tree_flatten(tree)
    return kind if structure.is_leaf() else (structure, *map(_described, leaves))


class _StandIn(torch.autograd.Function):
    """A tensor on a device with a graph edge from a tensor on meta."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, device: torch.device) -> Tensor:
        """NaN, or zeros where there is none, in memory of its own: a frame may write into it."""
        value = math.nan if source.is_floating_point() or source.is_complex() else 0
        return torch.full(source.shape, value, dtype=source.dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Never called: only the graph is used."""
        raise NotImplementedError("a placeholder has no gradient")


def stand_in_for(leaf: Any, device: torch.device | None) -> Any:
    """NaN on a device in place of a tensor on meta, with an edge of autograd's graph from it; other leaves stay."""
    return _StandIn.apply(leaf, device) if isinstance(leaf, Tensor) else leaf  # type: ignore[no-untyped-call]


@contextmanager
def stand_in(
    frames: Iterable[nn.Module], elsewhere: Callable[[nn.Parameter], bool], device: torch.device | None = None
) -> Iterator[None]:
    """Replace the frames' own parameters that are `elsewhere` by NaN inside; frames run with every layer.

    Args:
        device: of the placeholders; by default that of the parameter.
    """
    own = ((frame, name, p) for frame in frames for name, p in frame._parameters.items())
    named = [(frame, name, p) for frame, name, p in own if p is not None and elsewhere(p)]
    for frame, name, parameter in named:
        frame._parameters[name] = _absent(parameter, device or parameter.device)
    try:
        yield
    finally:
        for frame, name, parameter in named:
            frame._parameters[name] = parameter


def _absent(parameter: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    """NaN in the shape of a parameter, in the memory of one element."""
    value = torch.full((), math.nan, device=device).to(parameter.dtype)
    return nn.Parameter(value.expand(parameter.shape), requires_grad=False)
