"""Recomputation of activations in the backward (Chen et al., 1604.06174).

Read `segments` (forwards of blocks of which the input alone is kept), `recomputation` (around the blocks of a model)
and `operations` (results that a block keeps, so that the cheap ones alone are computed again). `shards` and `arena` are
P_a and M_D of ZeRO-R; `kinds` makes the recomputation of a plan from its `policy`; `auto` decides within a budget.
"""
