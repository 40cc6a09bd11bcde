"""Rewrites of calls beside a cache of keys and values: for kernels that decode, and read pages."""
