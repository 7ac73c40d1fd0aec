"""Interoperation: configurations, checkpoints and trainers of other packages in zeroshard's terms.

Read `deepspeed_config.py` with its table `deepspeed_keys.py`, then `deepspeed_weights.py` above `inert_pickle.py`.
`lightning.py` above `lightning_engines.py` needs lightning and is imported by its own name.
"""

from zeroshard.interop.deepspeed_config import from_deepspeed
from zeroshard.interop.deepspeed_notes import FromDeepSpeed, Note
from zeroshard.interop.deepspeed_schedule import DeepSpeedSchedule
from zeroshard.interop.deepspeed_weights import DeepSpeedWeights
from zeroshard.interop.master_weights import MasterWeights
from zeroshard.interop.optimizer import EngineOptimizer

__all__ = [
    "DeepSpeedSchedule",
    "DeepSpeedWeights",
    "EngineOptimizer",
    "FromDeepSpeed",
    "MasterWeights",
    "Note",
    "from_deepspeed",
]
