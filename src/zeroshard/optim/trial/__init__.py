"""Trial steps of a user's optimizer: whether it treats each element alone, and the states it makes.

Read `probe` over `dependence` and `data_flow`.
"""
