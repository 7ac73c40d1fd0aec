"""Quantised weights: frozen weights in 4 or 8 bits, as bitsandbytes and torchao keep them (QLoRA, 2305.14314)."""
