"""Explanations of errors in a model's forward: of dtypes, by module and tensors, and of arguments, by the batch."""

import inspect
import re
from collections.abc import Iterator, Mapping
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import nn

from zeroshard.errors import BatchError, ModelError, ZeroshardError
from zeroshard.precision.cast import Precision
from zeroshard.units.hooks import IN_TRANSFORM

CLASH = "Tensors of different dtypes met in "
ABOUT_DTYPES = re.compile(r"dtype|scalar type|same type|should be the same|primitive descriptor", re.IGNORECASE)
CALLS = ("_wrapped_call_impl", "_call_impl", "inner")  # of nn.Module, around each forward
SHOWN = 6  # names of tensors per dtype


def explain_clash(error: BaseException, model: nn.Module, precision: Precision) -> None:
    """Add a note to an error of the model's forward, if tensors of different dtypes caused it."""
    if not isinstance(error, (RuntimeError, ValueError)) or isinstance(error, ZeroshardError):
        return
    if not ABOUT_DTYPES.search(str(error)):
        return
    paths = {module: path for path, module in model.named_modules()}
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    inside = [n for n, frame in enumerate(frames) if _module_of(frame) in paths and frame.f_code.co_name not in CALLS]
    if not inside:
        return
    module = _module_of(frames[inside[-1]])
    assert module is not None
    names: dict[torch.dtype, list[str]] = {}
    seen: set[int] = set()
    for name, tensor in _tensors(frames[inside[-1] :], module):
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            names.setdefault(tensor.dtype, []).append(name)
    if len(names) > 1:
        path = paths[module].partition(".parametrizations.")[0]
        found = "; ".join(
            f"{_short(dtype)}: {', '.join(list(dict.fromkeys(of))[:SHOWN])}" for dtype, of in names.items()
        )
        where = f"{type(module).__name__} at '{path}'" if path else f"the forward of {type(module).__name__}"
        error.add_note(f"{CLASH}{where} ({found}). {_way_out(path, precision)}")


def raise_explained(error: Exception, model: Any = None, batch: Any = None) -> None:
    """Raise the note of `explain_clash` or `explain_transform` as an error, if there is one.

    Args:
        model, batch: of a call with a batch (`step.batch.call_with`).

    Raises:
        ModelError: from `error`.
        BatchError: likewise, if the model takes other arguments.
    """
    if isinstance(error, TypeError) and isinstance(model, nn.Module):
        _refuse_misfit(error, model, batch)
    notes = getattr(error, "__notes__", [])
    for note in notes:
        if note.startswith((CLASH, IN_TRANSFORM)):
            notes.remove(note)
            raise ModelError(note) from error


def _refuse_misfit(error: TypeError, model: nn.Module, batch: Any) -> None:
    signature = inspect.signature(type(model).forward)
    args, keywords, given = [batch], dict[str, Any](), f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        args, keywords, given = [], dict(batch), f"a mapping with the keys {', '.join(map(str, batch))}"
    elif isinstance(batch, (tuple, list)):
        args, given = [*batch], f"{given} of {len(batch)}"
    try:
        signature.bind(model, *args, **keywords)
    except TypeError as misfit:
        named = ", ".join(list(signature.parameters)[1:]) or "nothing"
        raise BatchError(
            f"The batch is {given}, and the forward of {type(model).__name__} takes {named} ({misfit}). A mapping is "
            f"passed as keywords, a tuple or list as arguments. Give the batch what the forward takes, or a model "
            f"that takes all of it and returns the loss: class WithLoss(nn.Module) around yours, with "
            f"forward(self, x, y)."
        ) from error


def _way_out(path: str, precision: Precision) -> str:
    if precision.compute is None:
        return (
            "precision='fp32' casts nothing: give inputs and tensors made in the forward the dtype of the parameters, "
            "or let precision='bf16' cast inputs and parameters."
        )
    kept = f", or let the module compute in fp32 by Plan(fp32_modules=({path!r},))" if path else ""
    return (
        f"Parameters and the model's inputs are {_short(precision.compute)} here; a tensor that the forward makes, or "
        f"a buffer, is not. Cast it in the model, such as `mask.to(x.dtype)` or `torch.randn(..., dtype=x.dtype)`"
        f"{kept}."
    )


def _module_of(frame: FrameType) -> nn.Module | None:
    found = frame.f_locals.get("self")
    return found if isinstance(found, nn.Module) else None


def _tensors(frames: list[FrameType], module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors among the variables of the frames, and those of the module itself, by name."""
    for frame in frames:
        for name, value in frame.f_locals.items():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, torch.Tensor):
                    yield name, part
    own: list[tuple[str, Any]] = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    yield from own


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
