"""Expert parallelism: dispatch of rows to the ranks of their experts, and combine.

Read `technique`, `dispatch` and `exchange`.
"""
