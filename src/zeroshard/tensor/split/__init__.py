"""Split layers: each rank of a tensor group computes its shard of them, with the collectives between.

Read `technique` (the split of a model), `layers` (and the overlap of their messages) and `collectives`, then
`sequence`, and `vocabulary` with `logits` and `cross_entropy`.
"""
