"""Experts: their parameters, products and gradients, and those found in the models of others."""
