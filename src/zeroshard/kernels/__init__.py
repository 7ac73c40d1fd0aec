"""Kernels in C++ that are built at first use and called through ctypes, which releases the GIL.

Read `build`.
"""
