"""Published numbers that this package computes again, and those that wait for what is not built yet."""

from zeroshard.claims.claim import Claim, Outcome, Reading, Waiting, check
from zeroshard.claims.later import LATER
from zeroshard.claims.offload import OFFLOAD
from zeroshard.claims.pipelines import PIPELINES
from zeroshard.claims.zero import ZERO

CLAIMS: dict[str, Claim | Waiting] = {claim.name: claim for claim in (*ZERO, *OFFLOAD, *PIPELINES, *LATER)}

__all__ = ["CLAIMS", "Claim", "Outcome", "Reading", "Waiting", "check"]
