"""Replay: a second run of a module's forward, with the random numbers, attributes and results of the first.

Read `replay`, then `generators` (random state) and `results` (collectives that run once).
"""
