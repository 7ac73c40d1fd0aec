"""Offload: optimizer states, parameters and gradients in host memory or on a disk (ZeRO-Offload, 2101.06840).

Read `policy` (what a plan offloads), `host_tiers` (where it is kept), `host_sum` (gradients), `host_updates` and
`updaters` (updates beside the device); `choice` answers the planner.
"""
