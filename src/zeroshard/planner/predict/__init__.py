"""Predictions of one plan: the engine rehearsed on tensors without values, its bytes, its traffic and its seconds.

Read `predict`, `ways` (one stage or several), `rehearse`, `memory_tracker`, then `stages` (time of a pipeline) and
`timed` (real tensors, on this machine).
"""
