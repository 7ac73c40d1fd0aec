"""Every exception that zeroshard raises on purpose.

Each message names what was found, what was needed, and the way out.
"""


class ZeroshardError(Exception):
    """Base of all errors of the package; catch it to catch them all."""


class PlanError(ZeroshardError, ValueError):
    """A `Plan` that cannot be carried out, found when the plan is made or meets its model."""


class ConfigError(ZeroshardError, ValueError):
    """An option, of a command or of an imported configuration, that is unknown, misspelt or of the wrong type."""


class DataError(ZeroshardError, ValueError):
    """Training data that is missing, empty, or too small for the batch asked for."""


class ModelError(ZeroshardError, ValueError):
    """A model that cannot be built, found, or materialised."""


class OptimizerError(ZeroshardError, ValueError):
    """An optimizer that cannot run on slices of flat buffers."""


class BatchError(ZeroshardError, ValueError):
    """A batch that cannot be cut as the plan asks, or no loss in the model's output."""


class NonFiniteError(ZeroshardError, ArithmeticError):
    """A loss or gradient that is not finite under `nonfinite="raise"`, or a loss that stays bad after rollbacks."""


class BudgetExceeded(ZeroshardError, MemoryError):
    """An allocation that does not fit the memory budget of its tier.

    Attributes:
        found: the message without the way out.
        shared: whether the other ranks raise it too, or were notified.
    """

    shared = False

    def __init__(self, found: str, way_out: str = "") -> None:
        super().__init__(f"{found} {way_out}".rstrip())
        self.found = found


class CommError(ZeroshardError, RuntimeError):
    """A collective that cannot complete: ranks disagree, a rank is silent, or a connection broke."""


class BudgetExceededElsewhere(BudgetExceeded, CommError):
    """Another rank is over its budget, so this rank's collective cannot complete."""

    shared = True


class CheckpointError(ZeroshardError, RuntimeError):
    """A checkpoint that is missing, damaged, or of another model."""


class CheckpointWarning(UserWarning):
    """A checkpoint that could not be written while training went on; earlier checkpoints are unharmed."""


class RoutingWarning(UserWarning):
    """A mixture whose routing collapses: dead experts, one with most tokens, or many dropped choices."""


class UnusedParameterWarning(UserWarning):
    """Trained parameters of a partly frozen model that got no gradient in the first steps, by name."""


class WholeLayersWarning(UserWarning):
    """Tensor parallelism that leaves layers whole on every rank: which share of the parameters, and where."""


class DamagedError(CheckpointError):
    """A checkpoint whose content differs from what was written: a wrong digest, a wrong size or a missing file."""


class OffloadError(ZeroshardError, RuntimeError):
    """A disk that is full or does not answer, or a saved tensor that was changed before the backward read it."""


class DivergenceError(ZeroshardError, RuntimeError):
    """Replicas of the same weights that differ."""


class Stopped(ZeroshardError, RuntimeError):
    """The run was asked to stop (SIGTERM, SIGUSR1, Ctrl-C) and has saved its state, unless it saves no checkpoints.

    Attributes:
        signal: number of the signal; 0 if it is not known.
    """

    def __init__(self, message: str, signal: int = 0) -> None:
        super().__init__(message)
        self.signal = signal


class ReportError(ZeroshardError, RuntimeError):
    """A run folder from which no report can be drawn."""
