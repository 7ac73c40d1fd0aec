"""Offload: optimizer states, parameters and gradients in host memory or on a disk (ZeRO-Offload, 2101.06840).

Read `policy` (settings), `tiers` (where slices live), `updaters` (the update of one slice) and `updates` (sums of
gradients, and when updates run); `choice` answers the planner.
"""
