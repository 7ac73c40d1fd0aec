"""Activations: where tensors saved for backward are kept, and which are computed again (1602.08124, 1604.06174).

Read `keep` (on the device, as autograd does), `offload` (in host memory until the backward reads them), `savers` (a
list of such ways, of which the first that takes a tensor has it), `make` (the list of a plan) and `counts` (what stays
on the device, in the ledger). Then `policy` (the settings), `segments` (forwards of blocks of which the input alone is
kept), `recomputation` (which puts itself around the blocks of a model), and `operations` (results that a block keeps,
to compute the cheap ones alone). What is decided within a budget: `rotor` (the cheapest order of a chain's forwards and
backwards), `block_meter` and `saved_watch` (what blocks take), `kept_part` (what a block that is computed again may
keep), `remade` (tensors that are made again from others), `stored` (what it takes to have savers store a block),
`chain_decision` (all together), `nested` (segments in such an order), `budget`, `auto` and `auto_agreement`. `choice`
answers the planner.
"""
