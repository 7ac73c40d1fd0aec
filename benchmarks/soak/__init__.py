"""The faults of the soak test, and what they have in common. See benchmarks/soak.py."""
