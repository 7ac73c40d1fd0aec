"""Saved tensors: storage of autograd's tensors for the backward, on the device, on the host or compressed.

Read `savers` (a list; the first saver that takes a tensor stores it), then `offload` (to host memory until the backward
reads it; vDNN, 1602.08124), `compression` and `gist` (Gist, ISCA 2018) with their `codes`, and `kept` (tensors that
stay, in the ledger). Tensors that share storage are stored once (`storages`).
"""
