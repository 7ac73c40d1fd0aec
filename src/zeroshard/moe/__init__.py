"""Mixtures of experts: a router sends each token to a few experts, which may lie on other ranks.

Shazeer et al. (1701.06538), GShard (2006.16668), Switch (2101.03961). Read `routing`, the record that all share; then
`router`, `layer`, `experts` and `technique`.
"""
