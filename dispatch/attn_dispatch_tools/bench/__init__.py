"""Speed and memory of this package beside every other installed package that computes the same.

A cell (`cells`) is one attention call of a grid (`grids`). Each of the `peers` makes a program for
it, which `measure` checks against ours, times in turns (`core.tuning.timing`) and profiles
(`device_time`). `run` goes through the cells and saves a `report`. The `table` and the `plots` are
made from the report alone.

`command` is `attn-dispatch bench`.
"""
