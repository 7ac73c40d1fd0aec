"""The search for the fastest plan that fits: which plans are tried, and in which order.

Read `search`, then `auto` (`Plan.auto`), `largest` (the largest model that fits) and `text` (descriptions of plans).
"""
