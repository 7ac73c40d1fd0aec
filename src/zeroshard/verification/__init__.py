"""Verification: a training run of a few steps under its plan against the same run in one process, down to a module.

Read `job`, `plain` (the definition), `observe` (one rank under the plan), `compare`, `bisect`, `causes`, in this order.
"""

from zeroshard.verification.result import Compared, FirstDifference, Verification
from zeroshard.verification.run import verify

__all__ = ["Compared", "FirstDifference", "Verification", "verify"]
