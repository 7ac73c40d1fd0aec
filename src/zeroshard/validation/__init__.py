"""Validation: refusals before or while an engine runs, with the way out.

Read `arguments` and `model_checks` (arguments of an engine), `division` (numbers of ranks), `fitting` and `refused`
(memory), `alike` (ranks that differ from the start) and `replicas` (ranks that differ after a fault).
"""
