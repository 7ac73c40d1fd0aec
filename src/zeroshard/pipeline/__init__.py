"""Pipelines: a model cut into stages (GPipe, 1811.06965; PipeDream, SOSP 2019; 2BW, 2006.09503; ZB-H1, 2401.10241).

Read `policy` (settings), `cut` (a chain of blocks), `stage` (the blocks of one rank) and `run` (the actions of a step);
`partition` divides a model over a cluster.
"""
