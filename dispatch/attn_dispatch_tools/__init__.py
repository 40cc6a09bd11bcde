"""The `attn-dispatch` command and what only it needs; the engine is `attn_dispatch`.

`cli` has the list of commands. `commands` has those that are one file each: info, explain, tune,
plan and completion. The others have a folder each: `verify`, `bench`, `pictures` (the command mask)
and `build_aiter`. They share `written_calls`, `reports` and `terminal`.
"""
