"""Optimizers over slices of flats: spans, updaters, and owners of whole tensors.

Read `spans` and `updater`; for whole tensors `owners` and `collective_spans`.
"""
