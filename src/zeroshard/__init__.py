"""zeroshard trains PyTorch models that do not fit: on many devices or on one."""

import logging
import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

from zeroshard.errors import (
    BatchError,
    BudgetExceeded,
    BudgetExceededElsewhere,
    CheckpointError,
    CheckpointWarning,
    CommError,
    ConfigError,
    DamagedError,
    DataError,
    DivergenceError,
    ModelError,
    NonFiniteError,
    OffloadError,
    OptimizerError,
    PlanError,
    ReportError,
    RoutingWarning,
    Stopped,
    UnusedParameterWarning,
    WholeLayersWarning,
    ZeroshardError,
)
from zeroshard.platform.imports import uncollected
from zeroshard.version import __version__

logging.getLogger(__name__).addHandler(logging.NullHandler())  # programs decide what is shown

if TYPE_CHECKING:
    from zeroshard.comm.mesh import Mesh, init_mesh
    from zeroshard.engine import Engine, StepResult, Trace
    from zeroshard.interop import DeepSpeedWeights, from_deepspeed
    from zeroshard.interop.huggingface import from_pretrained
    from zeroshard.moe.policy import ExpertParallel
    from zeroshard.offload.policy import Offload
    from zeroshard.parameter_server import AsynchronousTrainer
    from zeroshard.pipeline.policy import Pipeline
    from zeroshard.plan import Plan
    from zeroshard.planner.predict.model_flops import model_flops
    from zeroshard.precision.policy import LossScale
    from zeroshard.recompute.policy import Activations
    from zeroshard.resilience import Checkpoints, Guard
    from zeroshard.step.batch import Microbatches
    from zeroshard.tensor.policy import TensorParallel
    from zeroshard.verification import Verification, verify
else:
    # modules that need torch are loaded on first use, so that commands without torch start at once (PEP 562)
    _MODULES = {
        "Activations": "recompute.policy",
        "DeepSpeedWeights": "interop",
        "from_deepspeed": "interop",
        "from_pretrained": "interop.huggingface",
        "AsynchronousTrainer": "parameter_server",
        "Engine": "engine",
        "StepResult": "engine",
        "Trace": "engine",
        "Mesh": "comm.mesh",
        "Microbatches": "step.batch",
        "init_mesh": "comm.mesh",
        "ExpertParallel": "moe.policy",
        "LossScale": "precision.policy",
        "Offload": "offload.policy",
        "Pipeline": "pipeline.policy",
        "Plan": "plan",
        "TensorParallel": "tensor.policy",
        "Checkpoints": "resilience",
        "Guard": "resilience",
        "Verification": "verification",
        "model_flops": "planner.predict.model_flops",
        "verify": "verification",
    }

    def __getattr__(name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            path = f"{__name__}.{_MODULES.get(name, name)}"
            with nullcontext() if path in sys.modules else uncollected():  # which may walk all frozen objects
                module = import_module(path)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        if name == "Plan":
            module.Plan._search = _search
        return globals().setdefault(name, getattr(module, name)) if name in _MODULES else module

    def _search(*job: object) -> object:
        """Run the planner's search with the arguments of `Plan.auto`, in their order."""
        return import_module(f"{__name__}.planner.search.auto").plan_for(*job)

    def __dir__() -> list[str]:
        """Only the public names, and the modules that pages write as `zs.optim` and the like."""
        return sorted([*__all__, "losses", "moe", "optim"])


__all__ = [
    "Activations",
    "AsynchronousTrainer",
    "BatchError",
    "BudgetExceeded",
    "BudgetExceededElsewhere",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "CommError",
    "ConfigError",
    "DamagedError",
    "DataError",
    "DeepSpeedWeights",
    "DivergenceError",
    "Engine",
    "ExpertParallel",
    "Guard",
    "LossScale",
    "Mesh",
    "Microbatches",
    "ModelError",
    "NonFiniteError",
    "Offload",
    "OffloadError",
    "OptimizerError",
    "Pipeline",
    "Plan",
    "PlanError",
    "ReportError",
    "RoutingWarning",
    "StepResult",
    "Stopped",
    "TensorParallel",
    "Trace",
    "UnusedParameterWarning",
    "Verification",
    "WholeLayersWarning",
    "ZeroshardError",
    "__version__",
    "from_deepspeed",
    "from_pretrained",
    "init_mesh",
    "model_flops",
    "verify",
]
