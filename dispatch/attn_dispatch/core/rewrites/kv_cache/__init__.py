"""Rewrites of calls on a cache of keys and values, for kernels that decode or that read pages."""
