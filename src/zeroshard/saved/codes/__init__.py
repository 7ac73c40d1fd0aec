"""Codes of compressed activations (Gist, Jain et al., ISCA 2018; ActNN, 2104.14129; COAT, 2410.19313).

Read `small_floats` (floating-point numbers of 8, 10 and 16 bits), `sparse` (values that are not zero, and their
columns), `bits` (one or four bits per element) and `groups` (few bits for each element of a group, with a scale).
`kernels` computes some of them in C++ on a CPU, to the same bits.
"""
