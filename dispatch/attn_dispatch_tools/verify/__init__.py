"""The conformance suite: the same cases and the same judge for every implementation.

A `case` is one attention call; `cases` is the table of all of them. `suite.Conformance` runs a case
on an implementation, through `calls`, and judges it: results and gradients by `judge`, with what
`reference` computes in float64 and `naive` in the case's own dtype; dropout masks by `dropped`,
packed documents by `documents`. `draws` makes cases at random, with `dice` that fall the same
everywhere.

`command` is `attn-dispatch verify`: it gives the cases to the processes of a `pool`, each of which
is a `worker`, shows them on the `screen`, and writes a `report` of their `outcome`s.
"""
