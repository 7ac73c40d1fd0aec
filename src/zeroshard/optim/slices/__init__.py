"""Optimizers over slices of flats: spans, updaters, and ranks that share whole tensors.

Read `spans` and `updater`; for whole tensors `owners`, `joined` and `row_spans`.
"""
