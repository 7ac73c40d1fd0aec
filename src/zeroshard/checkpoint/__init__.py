"""Checkpoints on disk: safetensors shards and one JSON manifest, tensors by logical name and box, no pickle.

This package handles files, names and boxes; `zeroshard.engine.state` maps the parts of a model to them.
"""

from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.commit import WriteOrder, write
from zeroshard.checkpoint.disk import CheckpointDisk
from zeroshard.checkpoint.folder import clear, committed, find_checkpoint, name_of, put_aside, retain
from zeroshard.checkpoint.manifest import DTYPES, FORMAT, MANIFEST
from zeroshard.checkpoint.reader import Reader
from zeroshard.checkpoint.stream import Slot, write_tensors
from zeroshard.checkpoint.weights import BaseFiles, LoadReport, WeightFiles, WeightSource
from zeroshard.checkpoint.writer import Fetched, Meeting, Notes, Saving, Snapshot, TensorPiece

__all__ = [
    "DTYPES",
    "FORMAT",
    "MANIFEST",
    "BaseFiles",
    "Box",
    "CheckpointDisk",
    "Fetched",
    "LoadReport",
    "Meeting",
    "Notes",
    "Reader",
    "Saving",
    "Slot",
    "Snapshot",
    "TensorPiece",
    "WeightFiles",
    "WeightSource",
    "WriteOrder",
    "clear",
    "committed",
    "find_checkpoint",
    "name_of",
    "put_aside",
    "retain",
    "write",
    "write_tensors",
]
