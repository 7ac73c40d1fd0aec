"""The planner: which plans fit, and how long a step takes under each, before anything runs.

Read `predict` (one plan, rehearsed), `search` (the fastest that fits), and `choices` (the choices of techniques).
"""
