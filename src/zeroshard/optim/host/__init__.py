"""Updates on CPUs, in memory and offloaded: Adam (`adam`, `tiled`) and Adafactor, with their kernels."""
