"""Saved tensors: storage of what autograd saves for the backward, on the device, on the host or compressed.

Read `savers` (a list, of which the first saver that takes a tensor has it), then `offload` (in host memory until the
backward reads them; vDNN, 1602.08124), `compression` and `gist` (Gist, ISCA 2018) with their `codes`, and `kept`
(tensors that stay, in the ledger). Those that share storage are stored once (`storages`).
"""
