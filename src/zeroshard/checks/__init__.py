"""Checks: what is refused before or while an engine runs, with the way out.

Read `arguments` and `model_checks` (what comes in), `fitting` and `refused` (memory), `alike` (ranks that differ from
the start) and `replicas` (ranks that came to differ).
"""
