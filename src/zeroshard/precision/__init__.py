"""Mixed precision (Micikevicius et al., 1710.03740): 16-bit compute, fp32 master weights, loss scaling."""
