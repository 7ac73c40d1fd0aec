"""The states that each rank keeps: the whole difference between the stages of ZeRO."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Residency:
    """A rank's part of each flat buffer: all of it, or only its slice (1910.02054, section 5).

    Attributes:
        slice_states: master weights and optimizer states in slices (stage 1 and up); the rank updates only its slice.
        slice_gradients: gradients in slices, the rest dropped as soon as it is reduced (stage 2 and up).
        slice_parameters: parameters in slices, gathered for use and freed after it (stage 3).
    """

    slice_states: bool
    slice_gradients: bool
    slice_parameters: bool

    @classmethod
    def of_stage(cls, stage: int) -> "Residency":
        """The residency of stage 0 (plain data parallel), 1, 2 or 3."""
        return cls(stage >= 1, stage >= 2, stage >= 3)

    @property
    def publish_after_update(self) -> bool:
        """Whether updated slices are gathered right after the update, since every rank keeps whole parameters."""
        return self.slice_states and not self.slice_parameters
