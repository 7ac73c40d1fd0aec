"""Offload: optimizer states kept in host memory and updated there (ZeRO-Offload, arXiv 2101.06840)."""
