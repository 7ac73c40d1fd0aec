"""Split layers: each rank of a tensor group computes its shard of them, with the collectives between.

Read `technique` (what a split does to a model), `layers` and `collectives`, then `sequence`, `vocabulary` with
`logits` and `cross_entropy`, and `overlap`.
"""
