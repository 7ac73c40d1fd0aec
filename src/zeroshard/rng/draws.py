"""Torch's random operations, with the words of a stream instead of a generator's.

`DRAWS` has one function for each supported operation, called with the stream and the operation's own arguments.
Distributions are torch's; the numbers are not.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.rng.layout import Stream

Values = Callable[[Tensor], Tensor]  # of words [..., per element], values [...]
aten = torch.ops.aten
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}  # of a uniform number


def filled(stream: Stream, out: Tensor, per_element: int, values: Values) -> Tensor:
    """`out` with a value for each element, each from `per_element` words."""
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    for part, bits in stream.tiles(target, per_element):
        part.copy_(values(bits))
    return out if target is out else out.copy_(target)


def uniform(stream: Stream, out: Tensor) -> Tensor:
    """Numbers in [0, 1), in steps of the dtype's precision below 1."""
    digits = DIGITS.get(out.dtype)
    if digits is None:
        raise NotImplementedError(out.dtype)
    return filled(stream, out, 2 if digits > 32 else 1, lambda bits: _fractions(bits, digits))


def normal(stream: Stream, out: Tensor) -> Tensor:
    """Numbers of mean 0 and deviation 1 (Box and Muller, 1958)."""
    digits = 53 if out.dtype == torch.float64 else 24

    def values(bits: Tensor) -> Tensor:
        first, second = bits.chunk(2, dim=-1)
        radius = (1 - _fractions(first, digits)).log().mul(-2).sqrt()
        return radius * (_fractions(second, digits) * (2 * math.pi)).cos()

    return filled(stream, out, 4 if digits > 32 else 2, values)


def bernoulli(stream: Stream, out: Tensor, p: float) -> Tensor:
    """Ones with probability `p`, to 32 binary digits, and zeros."""
    bound = round(p * 2**32) - 2**31
    if bound >= 2**31:
        return out.fill_(1)
    return filled(stream, out, 1, lambda bits: bits.squeeze(-1) < bound)


def integers(stream: Stream, out: Tensor, low: int, high: int) -> Tensor:
    """Whole numbers in [low, high)."""

    def values(bits: Tensor) -> Tensor:
        wide = bits.long()
        return ((wide[..., 0] & 2**31 - 1) << 32 | wide[..., 1] & 2**32 - 1) % (high - low) + low

    return filled(stream, out, 2, values)


def _fractions(bits: Tensor, digits: int) -> Tensor:
    """Numbers in [0, 1) of `digits` binary digits, from one word, or from two for more than 32."""
    if digits > 32:
        high, low = (bits[..., 0] >> 5).double(), (bits[..., 1] >> 6).double()  # 27 and 26 digits with their sign
        wide: Tensor = ((high + 2**26) * 2**26 + (low + 2**25)) * 2.0**-53
        return wide
    narrow: Tensor = ((bits.squeeze(-1) >> 32 - digits) + 2 ** (digits - 1)).float() * 2.0**-digits
    return narrow


def _made(stream: Stream, size: Sequence[int], options: dict[str, Any], default: torch.dtype | None = None) -> Tensor:
    """An empty tensor of a factory's arguments."""
    options = {name: value for name, value in options.items() if name in ("dtype", "layout", "device", "pin_memory")}
    return torch.empty(size, **{"dtype": default, **{k: v for k, v in options.items() if v is not None}})


def _like(tensor: Tensor, options: dict[str, Any]) -> Tensor:
    return torch.empty_like(tensor, **{name: v for name, v in options.items() if name != "generator" and v is not None})


def _exponential(stream: Stream, out: Tensor, rate: float = 1.0) -> Tensor:
    digits = 53 if out.dtype == torch.float64 else 24
    least = 2.0 ** -(digits + 1)  # never 0, as it is used as a divisor
    values: Values = lambda bits: (1 - _fractions(bits, digits)).log().neg().clamp_(min=least) / rate  # noqa: E731
    return filled(stream, out, 2 if digits > 32 else 1, values)


def _by_probabilities(stream: Stream, out: Tensor, probabilities: Tensor) -> Tensor:
    dtype = torch.float64 if probabilities.dtype == torch.float64 else torch.float32
    return out.copy_(uniform(stream, torch.empty_like(out, dtype=dtype)) < probabilities)


def _normal_of(stream: Stream, mean: Any, std: Any, *size: Any, **options: Any) -> Tensor:
    if size:
        out = _made(stream, size[0], options)
    else:
        given = [each for each in (mean, std) if isinstance(each, Tensor)]
        out = torch.empty(torch.broadcast_shapes(*(each.shape for each in given)), dtype=given[0].dtype,
                          device=given[0].device)  # fmt: skip
    return normal(stream, out).mul_(std).add_(mean)


def _whole_range(stream: Stream, out: Tensor) -> Tensor:
    """As `Tensor.random_()`: up to the largest whole number that the dtype holds exactly."""
    high = 2 ** DIGITS[out.dtype] + 1 if out.dtype.is_floating_point else torch.iinfo(out.dtype).max
    return integers(stream, out, 0, min(high, 2**63 - 1))


def _permutation(stream: Stream, count: int, **options: Any) -> Tensor:
    keys = integers(stream, torch.empty(count, dtype=torch.int64, device=options.get("device")), 0, 2**63 - 1)
    return keys.argsort(stable=True).to(options.get("dtype") or torch.int64)


def _multinomial(stream: Stream, weights: Tensor, count: int, replacement: bool = False, **_: Any) -> Tensor:
    """By a race of exponential times without replacement, by the inverse of the cumulative sums with it."""
    if not replacement or count == 1:
        times = _exponential(stream, torch.empty_like(weights, memory_format=torch.contiguous_format))
        return (weights / times).topk(count, dim=-1).indices
    sums = weights.cumsum(-1)
    found = uniform(stream, weights.new_empty(*weights.shape[:-1], count)) * sums[..., -1:]
    return torch.searchsorted(sums, found, right=True).clamp_(max=weights.shape[-1] - 1)


def _native_dropout(stream: Stream, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = bernoulli(stream, torch.empty_like(x, dtype=torch.bool), 1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _rrelu(stream: Stream, x: Tensor, noise: Tensor, low: float, high: float, training: bool, *_: Any) -> Tensor:
    slopes = uniform(stream, torch.empty_like(x)).mul_(high - low).add_(low)
    noise.copy_(torch.where(x <= 0, slopes, torch.ones_like(x)))
    return x * noise


def _between(stream: Stream, out: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return uniform(stream, out).mul_(high - low).add_(low)


DRAWS: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: lambda s, out, p=0.5, **_: bernoulli(s, out, p),
    aten.bernoulli.p: lambda s, like, p, **_: bernoulli(s, torch.empty_like(like), p),
    aten.bernoulli_.Tensor: lambda s, out, p, **_: _by_probabilities(s, out, p),
    aten.bernoulli.default: lambda s, p, **_: _by_probabilities(s, torch.empty_like(p), p),
    aten.native_dropout.default: _native_dropout,
    aten.uniform_.default: lambda s, out, *limits, **_: _between(s, out, *limits),
    aten.rand.default: lambda s, size, **options: uniform(s, _made(s, size, options)),
    aten.rand_like.default: lambda s, like, **options: uniform(s, _like(like, options)),
    aten.normal_.default: lambda s, out, mean=0.0, std=1.0, **_: normal(s, out).mul_(std).add_(mean),
    aten.randn.default: lambda s, size, **options: normal(s, _made(s, size, options)),
    aten.randn_like.default: lambda s, like, **options: normal(s, _like(like, options)),
    aten.normal.Tensor_float: lambda s, mean, std=1.0, **_: _normal_of(s, mean, std),
    aten.normal.float_Tensor: lambda s, mean, std, **_: _normal_of(s, mean, std),
    aten.normal.Tensor_Tensor: lambda s, mean, std, **_: _normal_of(s, mean, std),
    aten.normal.float_float: _normal_of,
    aten.exponential_.default: lambda s, out, rate=1.0, **_: _exponential(s, out, rate),
    aten.randint.default: lambda s, high, size, **o: integers(s, _made(s, size, o, torch.int64), 0, high),
    aten.randint.low: lambda s, low, high, size, **o: integers(s, _made(s, size, o, torch.int64), low, high),
    aten.randint_like.default: lambda s, like, high, **options: integers(s, _like(like, options), 0, high),
    aten.randint_like.low_dtype: lambda s, like, low, high, **options: integers(s, _like(like, options), low, high),
    aten.random_.default: lambda s, out, **_: _whole_range(s, out),
    aten.random_.to: lambda s, out, high, **_: integers(s, out, 0, high),
    getattr(aten.random_, "from"): lambda s, out, low, high, **_: integers(
        s, out, low, 2**63 - 1 if high is None else high
    ),
    aten.randperm.default: _permutation,
    aten.multinomial.default: _multinomial,
    aten.rrelu_with_noise.default: _rrelu,
}
UNTAGGED = (aten.random_, aten.binomial, aten._sample_dirichlet)  # random operations without torch's tag


def draws(operation: Any) -> bool:
    """Whether an operation of torch draws from its generators."""
    return torch.Tag.nondeterministic_seeded in operation.tags or operation.overloadpacket in UNTAGGED
