"""Routing: from tokens to experts and gates, with noise, capacity and balance losses.

Read `record` and `router`.
"""
