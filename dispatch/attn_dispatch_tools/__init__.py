"""The `attn-dispatch` command and what only it needs; the library itself is `attn_dispatch`.

`cli` has the list of commands. `commands` has the commands that fit one file each: info, explain,
tune, plan and completion. The others have a folder each: `verify`, `bench`, `pictures` (the command
mask) and `build_aiter`. All share `written_calls`, `reports` and `terminal`.
"""
