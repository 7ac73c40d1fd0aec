"""Compiled blocks: a block's own forward as a graph of torch.compile, inside of all layers of the engine.

Gathers, recomputation and the exchange of tokens stay outside of the graph, so a block that is computed again runs its
graph again, and no graph holds a weight that is freed after the forward.

[Note: compiled in place] `module.compile()` of torch makes a graph of the module's call, with its hooks and with the
layers around its forward. The engine's hooks that gather are called around that graph; of a module with layers the own
forward is compiled in the place of the call, with the same options. Torch's `compile` of each module is replaced on the
object, so that this holds whenever it is called.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from zeroshard.errors import PlanError
from zeroshard.units.forwards import ORDER, Forward, insert, layers_of
from zeroshard.units.hooks import Outside

LAYER = "graph"
RECORDS_ADDRESSES = ("reduce-overhead", "max-autotune")  # modes with graphs of CUDA, which read fixed addresses
LAYERED = ORDER.keys() - {LAYER}  # layers of techniques
CUDA_GRAPHS = "triton.cudagraphs"  # the setting that those modes make
INNER = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")  # of a wrapper of a backend, by version of torch


def compile_blocks(blocks: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """Compile the forwards of some modules; each is compiled at its first call.

    Args:
        options: of `torch.compile`, such as `dynamic`, `fullgraph`, `mode` and `backend`.

    Raises:
        PlanError: a mode that records addresses of weights, or a block that is compiled already.
    """
    check_options(options)
    for block in blocks:
        if LAYER in layers_of(block) or block._compiled_call_impl is not None:
            raise PlanError(
                f"A block of class {type(block).__name__} is compiled already; compile it once, by engine.compile() "
                f"or by block.compile()."
            )
        insert(block, LAYER, partial(_Graph, partial(torch.compile, **options)))


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options under which a graph reads weights at fixed addresses.

    Raises:
        PlanError: with the way out.
    """
    mode, more, backend = options.get("mode"), options.get("options") or {}, options.get("backend")
    if mode in RECORDS_ADDRESSES:
        raise _records(f"mode={mode!r}")
    if more.get(CUDA_GRAPHS):
        raise _records(f"options={{'{CUDA_GRAPHS}': True}}")
    if backend == "cudagraphs":
        raise _records(f"backend={backend!r}")


def _records(named: str, where: str = "") -> PlanError:
    return PlanError(
        f"{named}{where} records CUDA graphs, which read weights where they lay in the first step; the engine's "
        f"buffers move. Use mode='default' or mode='max-autotune-no-cudagraphs'."
    )


def follow_compiling(model: nn.Module) -> None:
    """Keep the engine's hooks outside of the graphs of modules that are or will be compiled in place.

    Raises:
        PlanError: a module is compiled with graphs that read weights at fixed addresses.
    """
    for path, module in model.named_modules():
        compiled = module._compiled_call_impl
        graph: Any = compiled or module  # a module that torch.compile has wrapped
        config: Any = getattr(graph, "get_compiler_config", dict)()
        if config and config.get(CUDA_GRAPHS):
            raise _records("mode='reduce-overhead' or 'max-autotune'", f", with which '{path}' is compiled,")
        if compiled is not None and not isinstance(compiled, CompiledCall):
            _take_over(module, compiled)
        vars(module)["compile"] = _Compile(module)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, modules that are compiled in place run as they are, for trials in which graphs would break."""
    compiled = {module: call for module in model.modules() if (call := module._compiled_call_impl) is not None}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


def _take_over(module: nn.Module, compiled: Callable[..., Any]) -> None:
    """Compile the own forward of a module with layers in the place of its call; put hooks around another's call."""
    context = inspect.getclosurevars(compiled).nonlocals.get("self")  # of torch.compile, with its options
    if LAYERED.isdisjoint(layers_of(module)) or not isinstance(context, torch._dynamo.eval_frame._TorchDynamoContext):
        module._compiled_call_impl = CompiledCall(module, compiled)
    else:
        module._compiled_call_impl = None
        insert(module, LAYER, partial(_Graph, context))


def check_compiler(compiler: Any) -> None:
    """Refuse a forward in a graph that reads weights at fixed addresses.

    Such a graph is made by `torch.compile(engine.model)` without a word to the engine.

    Args:
        compiler: of `hooks.active_compiler`.

    Raises:
        PlanError: with the way out.
    """
    backend = compiler
    while (inner := next((inner for name in INNER if (inner := getattr(backend, name, None))), None)) is not None:
        backend = inner
    if getattr(backend, "config", {}).get(CUDA_GRAPHS):
        raise _records("mode='reduce-overhead' or 'max-autotune'", " of a torch.compile around the engine's model")


class CompiledCall:
    """The graph of a module that is compiled in place, with hooks of engines around it ([Note: compiled in place])."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self._module, self._compiled = weakref.ref(module), compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        module = self._module()
        assert module is not None
        before, after = _outside(module._forward_pre_hooks), _outside(module._forward_hooks)
        output, left = None, dict(after)
        with _skipped_in_graph([*before.values(), *after.values()]):
            try:
                for key, hook in before.items():
                    if key in module._forward_pre_hooks_with_kwargs:
                        args, kwargs = hook.call(module, args, kwargs) or (args, kwargs)
                    else:
                        hook.call(module, args)
                output = self._compiled(*args, **kwargs)
                for key, hook in after.items():
                    left.pop(key)
                    changed = _leave(module, key, hook, (args, kwargs, output))
                    output = output if changed is None else changed
            except Exception:
                for key in module._forward_hooks_always_called & left.keys():
                    with suppress(Exception):  # the first error is the cause
                        _leave(module, key, left[key], (args, kwargs, output))
                raise
        return output


def _outside(hooks: Mapping[int, Any]) -> dict[int, Outside]:
    """Those among a module's hooks that belong around its graph."""
    return {key: hook for key, hook in hooks.items() if isinstance(hook, Outside) and not hook.skipped}


@contextmanager
def _skipped_in_graph(hooks: Iterable[Outside]) -> Iterator[None]:
    """Inside, these hooks do nothing in the graph of their module."""
    for hook in hooks:
        hook.skipped = True
    try:
        yield
    finally:
        for hook in hooks:
            hook.skipped = False


def _leave(module: nn.Module, key: int, hook: Outside, seen: tuple[Any, Any, Any]) -> Any:
    """Call a hook after a forward with the (args, kwargs, output) that it asks for."""
    args, kwargs, output = seen
    if key in module._forward_hooks_with_kwargs:
        return hook.call(module, args, kwargs, output)
    return hook.call(module, args, output)


class _Compile:
    """Replaces `Module.compile` on an engine's module; copies of the module have torch's own."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **options: Any) -> None:
        """Compile the module in place.

        Raises:
            PlanError: an option records addresses of weights.
        """
        module = self._module()
        assert module is not None
        check_options(options)
        type(module).compile(module, *args, **options)
        assert module._compiled_call_impl is not None
        _take_over(module, module._compiled_call_impl)

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        assert module is not None
        return _plain_compile, (module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        module = self._module()
        assert module is not None
        return _plain_compile(memo[id(module)])


def _plain_compile(module: nn.Module) -> MethodType:
    return MethodType(type(module).compile, module)


class _Graph:
    """The layer of a compiled forward; a copy of the block runs its own forward, which is not compiled."""

    def __init__(self, compile: Callable[[Forward], Forward], inner: Forward) -> None:
        self._inner, self._compiled = inner, compile(inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = _get_current_dispatch_mode() is None  # a mode that looks at single operations
        return (self._compiled if compiled else self._inner)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._inner, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own, (self._inner,)


def _own(forward: Forward) -> Forward:
    return forward
