"""Lengths, ids and cu_seqlens that cannot be right, and that no one can check before a call runs.

Such a call must not pass for a valid one: the output, lse and row maximum of the rows concerned are
NaN, as JAX's own out-of-bounds reads are, and gradients of and through them are 0. Other rows are
not affected. `RowIds` (row_ids.py) finds the invalid rows:

- A length outside 0 … L, cu_seqlens that do not ascend from 0 to at most L, or a side of a window
  below 0 invalidates all queries of the batch row.
- An id below 0 or above max_segments invalidates the queries that have it.
- With max_segments, an id is invalid, and so are all its queries, if its places are not one run,
  follow a larger id, or are more than the longest sequence may have, among queries or keys.
- With cu_seqlens, a sequence longer than its max_seqlen invalidates all its queries. On flash, if
  finite_padding promises that there is none, all queries are invalid then (flash/sequences.py).

Without max_segments ids are compared for equality, in whatever order they stand.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.given_ids import ID_OPERANDS
from attn_dispatch.semantics.row_ids import RowIds

_NAN_RESULTS = ("out", "lse", "row_max")
"""The results that are NaN in an invalid row."""


def invalid_queries(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array | None:
    """bool [B, 1|T], True where the query's results are NaN; None if nothing can be invalid."""
    return RowIds.of(spec, operands).invalid if may_be_invalid(spec) else None


def may_be_invalid(spec: AttentionSpec) -> bool:
    """Whether the call has an operand that ids depend on and that has not been checked."""
    return not spec.promises.is_checked and any(map(spec.has, ID_OPERANDS))


def nan_where_invalid(
    spec: AttentionSpec, operands: Mapping[str, jax.Array], results: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """The results of a forward call by name, with NaN in invalid rows."""
    return nan_where(invalid_queries(spec, operands), results)


def nan_where(invalid: jax.Array | None, results: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The results of a forward call by name, with NaN where `invalid_queries` says so."""
    if invalid is None:
        return dict(results)
    # out is [B, T, N, V], the others [B, N, T].
    of_rows = {4: invalid[..., None, None], 3: invalid[:, None]}
    return {
        name: jnp.where(of_rows[x.ndim], jnp.nan, x) if name in _NAN_RESULTS else x
        for name, x in results.items()
    }


def without_nan_lse(
    spec: AttentionSpec, operands: Mapping[str, jax.Array], *, known: jax.Array | None = None
) -> dict[str, jax.Array]:
    """The operands of a backward call, with -inf as the lse of invalid rows.

    The kernels then treat them as padding rows, whose gradients are 0. `known` are
    `invalid_queries`, if they were found before.
    """
    invalid = invalid_queries(spec, operands) if known is None else known
    if invalid is None:
        return dict(operands)
    return {**operands, "lse": jnp.where(invalid[:, None], -jnp.inf, operands["lse"])}
