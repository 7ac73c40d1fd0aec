"""Pipelines: a model cut into stages (GPipe, 1811.06965; PipeDream, SOSP 2019; 2BW, 2006.09503; ZB-H1, 2401.10241).

Read `policy` (what a plan says), `chain` and `stage` (the cut), `executor` and `chunks` (actions carried out), then
`messages`, `weight_stashing` and `tied_weights`; `profile` and `partition` split a model over a cluster.
"""
