"""Predictions of one plan: the engine rehearsed on tensors without values, its bytes, its traffic and its seconds.

Read `predict` (one stage or several, rehearsed or timed on this machine), `rehearse`, `memory_tracker`, then `stages`
(time of a pipeline).
"""
