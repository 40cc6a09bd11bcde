"""Speed and memory beside every other package that computes the same calls and is installed.

A `cell` is one attention call of a grid (`grids`). Each of the `peers` makes a program of it, which
`measure` checks against ours, times by turns (`timing`), and profiles (`device_time`). `run` goes
through the cells and keeps a `report`, from which alone the `table` and the `plots` are made.

`command` is `attn-dispatch bench`.
"""
