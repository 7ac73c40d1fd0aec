"""Running a stage: the actions of a schedule, carried out with the other stages.

Read `steps` (one step), `executor` (forwards and backwards), `chunks` (reductions and updates) and `messages`; then
`weight_stashing` (versions), `tied_weights`, `early_reductions` and `deferred` (weight gradients of zero bubbles).
"""
