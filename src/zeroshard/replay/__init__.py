"""Replay: a second run of a module's forward, with the random numbers and attributes of the first.

Read `replay`, then `generators` (random state).
"""
