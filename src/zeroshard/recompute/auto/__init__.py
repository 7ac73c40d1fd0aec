"""Recomputation decided block by block within the device's budget: `recompute="auto"` (Rotor, 1911.13214).

Read `auto_recomputation`, then `meter` (seconds and bytes of blocks) and `decision` (the fastest order within the
budget, by the dynamic program of `rotor`).
"""
