"""Tuning: the fastest way to compute a call is measured on the device, and kept for later calls.

`contest` runs and times the ways to compute a call, on arrays that `operands` makes. `winners`
keeps the results, where `core/select` finds them.
"""
