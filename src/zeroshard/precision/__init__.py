"""Mixed precision (Micikevicius et al., 1710.03740): 16-bit compute, fp32 master weights, loss scaling.

Read `policy` (the loss scale of a plan), `cast` (which dtype a parameter computes in), `loss_scaling`.
"""
