"""Trial steps of a user's optimizer: whether it is elementwise, and its states.

Read `probe` over `dependence` and `data_flow`.
"""
