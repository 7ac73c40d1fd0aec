"""Exact random numbers: draws of modules in training keyed by step, row and module (Philox: Salmon et al., SC'11).

Read `philox` (words from a key and a counter), `layout` (which dimension of a draw is the batch's), `draws` (torch's
operations that draw, from words) and `exact` (which step, rows, module and call a draw belongs to). `streams` has
torch's own numbers where layers are split among ranks.
"""
