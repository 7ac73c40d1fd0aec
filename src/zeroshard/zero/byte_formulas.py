"""The paper's formulas, independent of the engine: bytes that a rank must hold, and elements that it must send.

Rajbhandari et al., 1910.02054: section 3.1 for the bytes, section 5 for the stages, section 7 for the volume.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of model states on one rank, padding not included; fractions where N does not divide Ψ."""

    parameters: Fraction
    gradients: Fraction
    master_weights: Fraction
    optimizer_states: Fraction

    @property
    def total(self) -> Fraction:
        """Sum of all four."""
        return self.parameters + self.gradients + self.master_weights + self.optimizer_states

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.master_weights + other.master_weights,
            self.optimizer_states + other.optimizer_states,
        )


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes of one parameter: by default mixed-precision Adam, K = 12 (section 3.1)."""

    parameter: int = 2
    gradient: int = 2
    master_weight: int = 4
    optimizer_state: int | Fraction = 8


def state_bytes(
    parameters: int | Fraction,
    ranks: int | Fraction,
    zero: int,
    each: BytesPerParameter = BytesPerParameter(),
    frozen: bool = False,
) -> StateBytes:
    """Model states of one rank: 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N for stages 0 to 3 of mixed-precision Adam."""
    psi = Fraction(parameters)
    kept = [psi if zero < stage else psi / ranks for stage in (3, 2, 1)]
    if frozen:
        return StateBytes(each.parameter * kept[0], Fraction(0), Fraction(0), Fraction(0))
    return StateBytes(
        each.parameter * kept[0], each.gradient * kept[1], each.master_weight * kept[2], each.optimizer_state * kept[2]
    )


def wire_elements(parameters: int, ranks: int, zero: int, microbatches: int = 1, reductions: int = 1) -> dict[str, int]:
    """Elements on the wire per step by purpose: 2Ψ, 2Ψ, 2Ψ, 3Ψ for stages 0 to 3 with one microbatch (section 7).

    Args:
        microbatches: forwards and backwards per step; under stage 3 each gathers twice.
        reductions: how often a step reduces its gradients.
    """
    if ranks == 1:
        return {"gather parameters": 0, "reduce gradients": 0, "gather gradients": 0}
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * microbatches}[zero]
    return {
        "gather parameters": gathers * parameters,
        "reduce gradients": reductions * parameters,
        "gather gradients": parameters if zero == 0 else 0,
    }
