"""Sizes of the built-in model, from 1 million to 1.6 billion parameters, without an import of torch."""

from dataclasses import dataclass

from zeroshard.errors import ModelError


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a `GPT`."""

    vocabulary: int
    """Number of distinct tokens."""
    context: int
    """Longest sequence in tokens; rotary positions have no table, so it sizes no parameter."""
    width: int
    """Size of the residual stream."""
    heads: int
    """Attention heads; `width / heads` must be an even whole number."""
    layers: int
    """Number of blocks."""
    dropout: float = 0.0
    """Probability of zeroing an activation while training."""

    def __post_init__(self) -> None:
        """Raises `ModelError` for a width that the heads cannot share."""
        if self.width % (2 * self.heads):
            raise ModelError(
                f"a width of {self.width} does not give {self.heads} heads an even size each; "
                f"choose a multiple of {2 * self.heads}"
            )


SIZES: dict[str, GPTConfig] = {
    "tiny": GPTConfig(vocabulary=256, context=256, width=128, heads=2, layers=5),
    "small": GPTConfig(vocabulary=256, context=256, width=192, heads=3, layers=7),
    "medium": GPTConfig(vocabulary=256, context=512, width=320, heads=5, layers=8),
    "gpt2": GPTConfig(vocabulary=50257, context=1024, width=768, heads=12, layers=12),
    "gpt2-xl": GPTConfig(vocabulary=50257, context=1024, width=1600, heads=25, layers=48),
}
