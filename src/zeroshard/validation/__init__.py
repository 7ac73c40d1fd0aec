"""Validation: refusals before or while an engine runs, with the way out.

Read `arguments` and `model_checks` (arguments of an engine), `memory` and `fitting` (a budget that is exceeded), then
`rank_count` and `ranks` (ranks that a plan does not divide, or that differ, from the start or after a fault).
"""
