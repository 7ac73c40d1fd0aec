"""Replacement of feed-forward layers by mixtures, with experts from trained layers."""
