"""Tuning: what runs a call fastest is found out on the device, and kept for whoever calls it later.

`contest` runs and times the ways in which a call can be computed, on arrays that `operands` makes;
`winners` keeps what came of it, and tells `core/select`.
"""
