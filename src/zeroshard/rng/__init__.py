"""Exact random numbers: draws of modules in training keyed by step, row and module (Philox: Salmon et al., SC'11).

Read `philox` (words from a key and a counter), `layout` (the batch's dimension of a draw), `draws` (torch's random
operations, from words) and `exact` (step, rows, module and call of a draw). `streams` is for torch's own numbers if
layers are split among ranks.
"""
