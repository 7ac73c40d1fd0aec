"""Published numbers, recomputed by this package.

Read `claim` (a number, its source and how it is computed), then `zero`, `pipelines`, `ptdp`, `switch` and `offload`.
"""

from zeroshard.reproduce.claim import Claim, Outcome, Reading, check
from zeroshard.reproduce.offload import OFFLOAD
from zeroshard.reproduce.pipelines import PIPELINES
from zeroshard.reproduce.ptdp import MEGATRON, PTDP
from zeroshard.reproduce.switch import SWITCH
from zeroshard.reproduce.zero import CONFIGURATION, ZERO

CLAIMS: dict[str, Claim] = {
    claim.name: claim for claim in (*ZERO, *CONFIGURATION, *OFFLOAD, *PIPELINES, *MEGATRON, *PTDP, *SWITCH)
}

__all__ = ["CLAIMS", "Claim", "Outcome", "Reading", "check"]
