"""Tensors inside any containers and objects; norms and checksums of flat ones."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

NOT_WALKED = (str, bytes, int, float, type, nn.Module, FunctionType, MethodType, ModuleType)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors in mappings, sequences, sets and attributes of any objects."""
    pending, seen = [tree], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif item is not None and not isinstance(item, NOT_WALKED) and id(item) not in seen:
            seen.add(id(item))
            pending += [value for _, value in _children(item)]


def with_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`tree` with `change` applied to each tensor: tuples and sets are made anew, all else is changed in place."""
    seen: set[int] = set()

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return change(item)
        if item is None or isinstance(item, NOT_WALKED) or id(item) in seen:
            return item
        seen.add(id(item))
        changed = [(key, value, walk(value)) for key, value in _children(item)]
        if isinstance(item, (tuple, Set)):
            values = [new for _, _, new in changed]
            return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)  # type: ignore[call-arg]
        for key, old, new in changed:
            if new is not old:
                _put(item, key, new)
        return item

    return walk(tree)


def _children(item: Any) -> list[tuple[Any, Any]]:
    """(key, index or attribute name; value) of each member of an object."""
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, (list, tuple, Set)):
        return list(enumerate(item))
    slots = [name for kind in type(item).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    held = {name: getattr(item, name) for name in slots if hasattr(item, name)}
    return list((held | getattr(item, "__dict__", {})).items())


def _put(item: Any, key: Any, value: Any) -> None:
    if isinstance(item, (list, MutableMapping)):
        item[key] = value
    elif not isinstance(item, Mapping):
        object.__setattr__(item, key, value)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


TILE = 2**16  # elements; torch would first copy a whole 16-bit vector to fp32, beyond the size of the caches


def norm_of(values: torch.Tensor) -> torch.Tensor:
    """The 2-norm of a vector [n] as a scalar, computed in fp32 at least."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    valueless = values.untyped_storage().device.type == "meta"  # in a rehearsal
    if values.device.type != "cpu" or values.dtype == dtype or valueless:
        whole: torch.Tensor = torch.linalg.vector_norm(values, dtype=dtype)
        return whole
    parts = [torch.linalg.vector_norm(part, dtype=dtype) for part in values.split(TILE)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return norm


def wide_norm(values: torch.Tensor, kind: float = 2.0) -> float:
    """The p-norm of values, real or complex, for p = `kind`, computed in fp64."""
    dtype = torch.promote_types(values.dtype, torch.float64)
    return float(torch.linalg.vector_norm(values, kind, dtype=dtype))


CHUNK = 2**24  # bytes copied to the host at a time


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 of the bytes of 1-D tensors, one behind the other."""
    crc = 0
    for tensor in tensors:
        raw = tensor.detach().view(torch.uint8)
        for start in range(0, raw.numel(), CHUNK):
            crc = zlib.crc32(raw[start : start + CHUNK].cpu().numpy().data, crc)
    return crc
