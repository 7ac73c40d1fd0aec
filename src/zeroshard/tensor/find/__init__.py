"""Finding the layers of a model to split: attention, feed forward and vocabulary, each confirmed by a small run.

Read `found` (the result), `layers` (the search), `attention`, `feed_forward`, `vocabulary` and `stacks`, then `trial`,
`small_run` and `model_trial` (the confirmation).
"""
