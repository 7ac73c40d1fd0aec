"""One step: reduce gradients, agree on their losses and norms, decide, apply the update, end.

Read `sequence`, then `losses`, `agreement`, `clipping` and `context` (what code inside of models asks of the step).
"""
