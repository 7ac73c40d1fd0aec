"""What predicts the peak of memory, and the runs that tell how well. See benchmarks/estimates.py."""
