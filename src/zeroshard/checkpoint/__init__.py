"""Checkpoints on disk: safetensors shards and one JSON manifest, tensors by logical name and interval, no pickle.

This package knows files, names and intervals; `zeroshard.engine.state` knows which of them a model's shards are.
"""

from zeroshard.checkpoint.format import MANIFEST, Piece, Reader, write

__all__ = ["MANIFEST", "Piece", "Reader", "write"]
