"""Updates on CPUs, in memory and offloaded: Adam (`adam`, `in_memory`) and Adafactor, with their kernels."""
