"""Cutting a model into stages: its chain of blocks, the probe that finds it, and the values that bypass blocks.

Read `chain`, then `probe`; `gates` skip the forward of absent blocks, `placeholders` stand in for their outputs, and
`bypass` with `origins` follows values from before the blocks to each stage.
"""
