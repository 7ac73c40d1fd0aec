"""Activations: where tensors saved for backward are kept, and which are computed again (1602.08124, 1604.06174).

Read `keep` (on the device, as autograd does), `offload` (in host memory until the backward reads them), `savers` (a
list of such ways, of which the first that takes a tensor has it) and `make` (the list of a plan). Then `policy` (the
settings), `segments` (forwards of blocks of which the input alone is kept), `recomputation` (which puts itself around
the blocks of a model), `operations` (results that a block keeps, to compute the cheap ones alone), and `rotor` (the
cheapest order of a chain's forwards and backwards under a budget); `choice` answers the planner.
"""
