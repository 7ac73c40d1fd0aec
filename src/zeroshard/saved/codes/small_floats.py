"""Small floating-point numbers: fp16 (1/5/10 bits), fp10 (1/5/4, three in 32 bits), fp8 (1/4/3) of Gist, section 4.3.

[Note: rounding] Numbers are rounded to nearest, ties to even. There are no denormal numbers: a number of at most half
the smallest normal one becomes zero. Finite numbers beyond the largest become the largest. The highest exponent is
reserved for infinities and NaN, which are preserved, so that a diverging run shows; signs are preserved, also of zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.saved.codes.kernels import kernels_for

BIAS, DIGITS = 127, 23  # of fp32
INFINITY = 0x7F800000


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A format, and how its codes are packed.

    Attributes:
        exponent: its bits.
        mantissa: its bits.
        per_word: codes in a word.
        word: dtype of words.
    """

    exponent: int
    mantissa: int
    per_word: int
    word: torch.dtype

    @property
    def offset(self) -> int:
        """The difference of the exponents' biases of fp32 and this format, shifted to the exponent's bits in a code."""
        return (BIAS + 1 - (1 << self.exponent - 1)) << self.mantissa

    @property
    def most(self) -> int:
        """The code of the largest finite number."""
        return ((1 << self.exponent) - 1 << self.mantissa) - 1

    def words(self, numel: int) -> int:
        """Words of so many numbers."""
        return -(-numel // self.per_word)

    def nbytes(self, numel: int) -> int:
        """Bytes of so many numbers."""
        return self.words(numel) * self.word.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """The words of contiguous fp32 values [n]."""
        words = values.new_empty(self.words(values.numel()), dtype=self.word)
        if (kernels := kernels_for(values)) is not None:
            kernels.call("encode", self.exponent, self.mantissa, values, values.numel(), words)
            return words
        codes = self._codes(values.view(torch.int32))
        if self.per_word == 1:
            return codes.to(self.word)
        padded = codes.new_zeros(len(words) * self.per_word)
        padded[: len(codes)] = codes
        first, second, third = padded.view(-1, self.per_word).unbind(1)
        return first | second << 10 | third << 20

    def decode(self, words: Tensor, numel: int) -> Tensor:
        """The fp32 values [numel] of words."""
        if (kernels := kernels_for(words)) is not None:
            values = words.new_empty(numel, dtype=torch.float32)
            kernels.call("decode", self.exponent, self.mantissa, words, numel, values)
            return values
        codes = words.to(torch.int32)
        if self.per_word > 1:
            codes = torch.stack([codes >> 10 * part & 1023 for part in range(self.per_word)], 1).flatten()[:numel]
        size, shift = codes & 2 ** (self.exponent + self.mantissa) - 1, DIGITS - self.mantissa
        bits = (size + self.offset) << shift
        bits = torch.where(size < 2**self.mantissa, 0, bits)
        bits = torch.where(size > self.most, INFINITY | (size - self.most - 1) << shift, bits)
        sign = codes >> self.exponent + self.mantissa & 1
        return (bits | sign << 31).view(torch.float32)

    def _codes(self, bits: Tensor) -> Tensor:
        """The codes of fp32 numbers from their bits, both int32 ([Note: rounding])."""
        shift, least = DIGITS - self.mantissa, 2**self.mantissa
        size = bits & 2**31 - 1
        rounded = (size + (2 ** (shift - 1) - 1) + (size >> shift & 1)) >> shift
        codes = (rounded - self.offset).clamp(least, self.most)
        codes = torch.where(size <= self.offset << shift, 0, codes)  # half of the smallest number
        codes = torch.where(size == INFINITY, self.most + 1, codes)
        codes = torch.where(size > INFINITY, self.most + 1 | least >> 1, codes)
        return codes | (bits >> 31 & 1) << self.exponent + self.mantissa


FP16 = SmallFloat(5, 10, 1, torch.int16)
FP10 = SmallFloat(5, 4, 3, torch.int32)
FP8 = SmallFloat(4, 3, 1, torch.uint8)
