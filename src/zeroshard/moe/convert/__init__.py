"""Mixtures in the place of feed-forward layers, and experts from trained ones."""
