"""Pipelines: a model cut into a chain of layers, its profile, and the partition into stages."""
