"""Asynchronous data parallel: workers that do not wait for each other, around a parameter server.

ASP: workers push gradients and pull weights, each at its own speed (Dean et al., Large Scale Distributed Deep Networks,
NIPS 2012, section 4.1). SSP: no worker is more than s steps ahead of the slowest (Ho et al., More Effective Distributed
ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013, section 3).
"""

from zeroshard.parameter_server.server import Server, Wire
from zeroshard.parameter_server.trainer import AsynchronousStep, AsynchronousTrainer, Staleness

__all__ = ["AsynchronousStep", "AsynchronousTrainer", "Server", "Staleness", "Wire"]
