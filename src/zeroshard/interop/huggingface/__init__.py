"""Pretrained models of transformers: weights from their files into the slices of ranks.

Read `loading.py`, then `pretrained.py`, which compares a model with its files, and `conversion.py` with `lazy.py` under
it, which follow transformers' own tables of names and operations.
"""

from zeroshard.interop.huggingface.loading import LoadOptions, from_pretrained

__all__ = ["LoadOptions", "from_pretrained"]
