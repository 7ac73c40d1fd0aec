"""Tensor parallelism: layers split among ranks that work on the same data, with sequence parallelism around them.

Megatron-LM (1909.08053, section 3; 2104.04473 for three axes in one mesh; 2205.05198 for sequence parallelism).
Read `policy` (settings), `find` (which layers of a model) and `split` (how they compute).
"""
