"""Recomputation of activations in the backward (Chen et al., 1604.06174).

Read `segments` (forwards of blocks that keep only their input), `recomputation` (around the blocks of a model) and
`operations` (results that a block keeps, so that only cheap ones are recomputed). `chunks` recomputes the chunks of a
pipeline. `kept_inputs` stores inputs, with `shards` and `arena`, P_a and M_D of ZeRO-R; `kinds` makes the recomputation
of a plan from its `policy`; `auto` decides within a budget.
"""
