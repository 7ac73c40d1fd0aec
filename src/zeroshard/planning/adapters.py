"""Low-rank adapters that are trained beside the frozen weights of a model, by name and rank."""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

AdapterName = Literal["lora", "qlora"]
NAMES: dict[AdapterName, str] = {"lora": "LoRA", "qlora": "QLoRA"}
RANK = 16
SCALE = 2  # lora_alpha divided by the rank: a factor of the adapters' product
OF_RANK = " of rank "


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of all linear layers but the output layer (LoRA, 2106.09685).

    Attributes:
        name: "qlora" for frozen weights in 4 bits (QLoRA, 2305.14314).
        rank: of each pair of matrices.
    """

    name: AdapterName
    rank: int = RANK

    def __str__(self) -> str:
        return f"{NAMES[self.name]}{OF_RANK}{self.rank}"

    def config(self) -> Any:
        """The configuration of peft, which needs that package."""
        return importlib.import_module("peft").LoraConfig(
            r=self.rank, lora_alpha=SCALE * self.rank, target_modules="all-linear"
        )

    @classmethod
    def parse(cls, text: str) -> "Adapters":
        """The adapters of a text that `str` made."""
        written, _, rank = text.partition(OF_RANK)
        return cls(next(name for name, own in NAMES.items() if own == written), int(rank))
