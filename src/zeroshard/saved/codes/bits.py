"""Codes of one bit or four per element, for the backward of a ReLU and of a max-pool (Gist, section 4.1)."""

import torch
from torch import Tensor

from zeroshard.saved.codes.kernels import kernels_for


def pack_bits(flags: Tensor) -> Tensor:
    """The flags of a bool tensor [...] in memory order of its elements, eight to a byte: uint8 [n / 8, rounded up]."""
    flags = flags.contiguous()
    packed = flags.new_empty(-(-flags.numel() // 8), dtype=torch.uint8)
    if (kernels := kernels_for(flags)) is not None:
        kernels.call("pack_bits", flags, flags.numel(), packed)
        return packed
    padded = flags.new_zeros(len(packed) * 8, dtype=torch.uint8)
    padded[: flags.numel()] = flags.flatten()
    places = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """The flags bool [numel] from the result of `pack_bits`."""
    flags = packed.new_empty(numel, dtype=torch.bool)
    if (kernels := kernels_for(packed)) is not None:
        kernels.call("unpack_bits", packed, numel, flags)
        return flags
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> places & 1).flatten()[:numel].bool()


def pack_halves(numbers: Tensor) -> Tensor:
    """Numbers below 16, uint8 [...], two to a byte: uint8 [n / 2, rounded up]."""
    numbers = numbers.flatten()
    if numbers.numel() % 2:
        numbers = torch.cat([numbers, numbers.new_zeros(1)])
    return numbers[::2] | numbers[1::2] << 4


def unpack_halves(packed: Tensor, numel: int) -> Tensor:
    """The numbers uint8 [numel] from the result of `pack_halves`."""
    return torch.stack([packed & 15, packed >> 4], 1).flatten()[:numel]
