"""What is kept below the device, and how it is updated there."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices of one plan.

    Attributes:
        optimizer: optimizer states are below, and updated there.
        parameters: slices of parameters are below, and come up for each use.
        activations: what is saved for the backward goes below until then.
        share: of the parameters, in whole units, whose states are below.
        disk: folder of the states; None for host memory.
        disk_parameters: parameters are in that folder too.
        moments: how Adam's moments are kept: "fp32", "bf16" or "8bit".
        delayed: an update runs beside the next step (2101.06840, section 5).
        warmup: steps before the first delayed one.
        speculates: updates run during the backward, before it is known that they should.
        several: gradients of several microbatches add up.
        timeout: seconds that a wait may take.
    """

    optimizer: bool = False
    parameters: bool = False
    activations: bool = False
    share: float = 1.0
    disk: str | None = None
    disk_parameters: bool = False
    moments: str = "fp32"
    delayed: bool = False
    warmup: int = 40
    speculates: bool = True
    several: bool = False
    timeout: float = 300.0

    @property
    def settings(self) -> list[str]:
        """The settings that are for the host's own Adam, by the names of the plan's fields."""
        chosen = {
            "offload_disk": (self.disk, None),
            "delayed_update": (self.delayed, False),
            "offload_moments": (self.moments, "fp32"),
        }
        return [f"{name}={value!r}" for name, (value, default) in chosen.items() if value != default]
