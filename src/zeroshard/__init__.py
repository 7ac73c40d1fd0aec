"""zeroshard trains PyTorch models that do not fit: on many devices or on one."""

from zeroshard.engine import Engine, StepResult
from zeroshard.errors import ZeroshardError
from zeroshard.mesh import Mesh, init_mesh
from zeroshard.plan import Plan
from zeroshard.version import __version__

__all__ = ["Engine", "Mesh", "Plan", "StepResult", "ZeroshardError", "__version__", "init_mesh"]
