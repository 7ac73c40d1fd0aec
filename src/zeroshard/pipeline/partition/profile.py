"""A profile: the measured costs of each layer of a model for one microbatch, in a JSON file."""

import dataclasses
import json
import math
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
        saved_bytes: tensors that its forward saves for its backward.
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
    """The costs of a model's layers from first to last, and the machine of the measurement."""

    model: str
    machine: str
    microbatch_rows: int
    layers: tuple[LayerCost, ...]

    def save(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        except OSError as error:
            raise DataError(
                f"The profile {path} cannot be written ({error.strerror}); name a file that can be written."
            ) from error

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read a file of `save`.

        Raises:
            DataError: no such file, or no profile.
        """
        try:
            content = facts(cls, json.loads(path.read_text()))
            layers = [facts(LayerCost, layer) for layer in content.pop("layers")]
            check_layers(layers)
            return cls(layers=tuple(LayerCost(**layer) for layer in layers), **content)
        except OSError as error:
            raise DataError(
                f"The profile {path} cannot be read ({error.strerror}); `zeroshard profile` makes one."
            ) from error
        except (ValueError, TypeError) as error:
            raise DataError(f"{path} is no profile ({error}); `zeroshard profile` makes one.") from error


def facts(kind: type | tuple[str, ...], content: Any) -> dict[str, Any]:
    """The fields of a dataclass, or those of these names, all of them and nothing else.

    Raises:
        ValueError: others.
    """
    names = set(kind) if isinstance(kind, tuple) else {field.name for field in dataclasses.fields(kind)}
    if not isinstance(content, dict) or content.keys() != names:
        found = ", ".join(sorted(content)) if isinstance(content, dict) else repr(content)
        raise ValueError(f"{found or 'nothing'} stands where {', '.join(sorted(names))} should")
    return content


def check_layers(layers: list[dict[str, Any]]) -> None:
    """Whether these can be the facts of `LayerCost`.

    Raises:
        ValueError: no layers, or a number out of range.
    """
    if not layers:
        raise ValueError("it has no layers")
    for layer in layers:
        for name, value in layer.items():
            number = type(value) in (int, float) and 0 <= value < math.inf
            if name != "name" and not number:
                raise ValueError(f"{name} of {layer['name']!r} is {value!r}; it must be 0 or more, and finite")
