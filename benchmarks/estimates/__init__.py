"""Predictors of the peak of memory, and the runs that they are compared with. See benchmarks/estimates.py."""
