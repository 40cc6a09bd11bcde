"""The conformance suite: the same cases and the same judge for every implementation.

A `case` is one attention call; `cases` is the table of all. `suite.Conformance` runs a case on an
implementation, through `calls`. `judge` compares results and gradients with those of `reference`,
in float64, and `naive`, in the dtype of the case. `dropout_checks` tests dropout masks, and
`documents` packed documents. `draws` makes random cases, by a `seeded_random` that is the same
everywhere.

`command` is `attn-dispatch verify`: it distributes the cases over a `pool` of processes, each of
which is a `worker`, shows them on the `screen`, and writes a `report` of their `outcome`s.
"""
