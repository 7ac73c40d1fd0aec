"""Coming from elsewhere: configurations, checkpoints and trainers of other packages in zeroshard's terms.

Read `deepspeed_config.py` with its table `deepspeed_keys.py`, then `deepspeed_weights.py` above `inert.py`.
`lightning.py` needs lightning and is imported by its own name.
"""

from zeroshard.adopt.deepspeed_config import from_deepspeed
from zeroshard.adopt.deepspeed_notes import FromDeepSpeed, Note
from zeroshard.adopt.deepspeed_schedule import DeepSpeedSchedule
from zeroshard.adopt.deepspeed_weights import DeepSpeedWeights
from zeroshard.adopt.optimizer import EngineOptimizer

__all__ = ["DeepSpeedSchedule", "DeepSpeedWeights", "EngineOptimizer", "FromDeepSpeed", "Note", "from_deepspeed"]
