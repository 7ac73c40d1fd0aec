"""One step: reduce gradients, agree on their losses and norms, decide, apply the update, end.

Read `sequence`, then `losses`, `agreement` and `clipping`.
"""
