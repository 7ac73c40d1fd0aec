"""A profile: what each layer of a model costs for one microbatch, as measured, in a JSON file."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.errors import DataError


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer of a chain, for one microbatch (PipeDream, SOSP 2019, section 3.1).

    Attributes:
        forward_seconds: time of its forward.
        backward_seconds: time of its whole backward.
        activation_bytes: its output, which goes to the next layer.
        saved_bytes: what its forward keeps for its backward.
        parameter_bytes: its parameters.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    saved_bytes: int
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """The layers of a model from first to last, and where they were measured."""

    model: str
    machine: str
    microbatch_rows: int
    layers: tuple[LayerCost, ...]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read what `save` wrote.

        Raises:
            DataError: no such file, or no profile.
        """
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            layers = tuple(LayerCost(**layer) for layer in content.pop("layers"))
            return cls(layers=layers, **content)
        except OSError as error:
            raise DataError(
                f"The profile {path} cannot be read ({error.strerror}); `zeroshard profile` makes one."
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path} is no profile ({error}); `zeroshard profile` makes one.") from error
