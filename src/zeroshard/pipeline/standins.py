"""Stand-ins: what a module would return, as shapes only, for modules whose parameters are on other ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from zeroshard.errors import ModelError


class Standins:
    """Remembers, for each module and shape of its input, the shape of its output."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[list[Any], Any]] = {}
        self._recorded: dict[Any, tuple[list[Any], Any]] = {}

    def record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note what a real call returned; used where the module cannot run on the meta device."""
        self._recorded[_key(module, args, kwargs)] = tree_flatten(tree_map(_shape_of, output))

    def forget(self) -> None:
        """Find all shapes anew: the dtypes of parameters have changed."""
        self._known.clear()

    def of(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A stand-in for `forward(*args, **kwargs)`.

        Raises:
            ModelError: the module cannot run on the meta device.
        """
        key = _key(module, args, kwargs)
        if key not in self._known:
            self._known[key] = self._shapes(module, forward, key, args, kwargs)
        leaves, spec = self._known[key]
        device = next((leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        return tree_unflatten([_standin(leaf, device) for leaf in leaves], spec)

    def _shapes(self, module: nn.Module, forward: Callable[..., Any], key: Any, args: Any, kwargs: Any) -> Any:
        def to_meta(leaf: Any) -> Any:
            return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        gate = module.forward
        try:
            module.forward = forward
            with torch.no_grad():
                meta_args, meta_kwargs = tree_map(to_meta, (args, kwargs))
                output = functional_call(module, tree_map(to_meta, state), meta_args, meta_kwargs)
            return tree_flatten(tree_map(_shape_of, output))
        except Exception as error:
            if key in self._recorded:
                return self._recorded[key]
            raise ModelError(
                f"The shape of what {type(module).__name__} returns cannot be found without computing it "
                f"({error}); give every microbatch the shape of the example, or pad the last batch."
            ) from error
        finally:
            module.forward = gate


class _Shape:
    """Shape and dtype of a tensor that is not there."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def is_standin(value: Any) -> bool:
    """Whether a tensor is a stand-in (a view or a result of one is not)."""
    return getattr(value, "_zeroshard_standin", False)


def _shape_of(leaf: Any) -> Any:
    return _Shape(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _standin(leaf: Any, device: torch.device | None) -> Any:
    if not isinstance(leaf, _Shape):
        return leaf
    tensor = torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.shape)
    tensor._zeroshard_standin = True  # type: ignore[attr-defined]
    return tensor


def _key(module: nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    described = (
        (leaf.shape, leaf.dtype)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, (int, float, str, bool, type(None)))
        else type(leaf)
        for leaf in leaves
    )
    return id(module), module.training, tuple(described), spec
