"""Published numbers, computed again by this package, and a list of those that are not computed yet.

Read `claim` (a number, its source and how it is computed), then `zero`, `configurations`, `pipelines`, `megatron`,
`ptdp`, `switch`, `offload` and `later`.
"""

from zeroshard.reproduce.claim import Claim, Outcome, Reading, Waiting, check
from zeroshard.reproduce.configurations import CONFIGURATION
from zeroshard.reproduce.later import LATER
from zeroshard.reproduce.megatron import MEGATRON
from zeroshard.reproduce.offload import OFFLOAD
from zeroshard.reproduce.pipelines import PIPELINES
from zeroshard.reproduce.ptdp import PTDP
from zeroshard.reproduce.switch import SWITCH
from zeroshard.reproduce.zero import ZERO

CLAIMS: dict[str, Claim | Waiting] = {
    claim.name: claim for claim in (*ZERO, *CONFIGURATION, *OFFLOAD, *PIPELINES, *MEGATRON, *PTDP, *SWITCH, *LATER)
}

__all__ = ["CLAIMS", "Claim", "Outcome", "Reading", "Waiting", "check"]
