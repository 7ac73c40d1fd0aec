"""Replay: a second run of a module's forward, with the random numbers, buffers and attributes of the first.

Read `replay`, then `generators` (generators of random numbers that a module can reach).
"""
