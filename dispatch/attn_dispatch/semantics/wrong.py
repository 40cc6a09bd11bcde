"""What is wrong in lengths, ids and cu_seqlens, found where no one can look at them before a call.

Such a call must not pass for a right one: `RowIds` (row_ids.py) gives the rows that it concerns,
and their output, lse and row maximum are NaN, as JAX's own reads out of bounds are. Other rows are
what they would be without them, and gradients of and through NaN rows are 0.

- A length outside of 0 … L, cu_seqlens that do not ascend from 0 to at most L, or a side of a
  window below 0: all queries of the batch row.
- An id below 0 or above max_segments: the query that has it.
- With max_segments: an id whose places are not one run, or stand after a larger id, or are more
  than the longest may have, among queries or keys: all queries of that id. So with cu_seqlens a
  sequence longer than its max_seqlen.

Without max_segments ids are compared for equality, in whatever order they stand.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.row_ids import RowIds, may_be_wrong

_MARKED = ("out", "lse", "row_max")
"""The results of which a wrong row is NaN."""


def wrong_queries(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array | None:
    """Whose results are NaN, bool [B, 1|T]; None where nothing can be wrong."""
    return RowIds.of(spec, operands).wrong if may_be_wrong(spec) else None


def marked(
    spec: AttentionSpec, operands: Mapping[str, jax.Array], results: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """The results of a forward call by name, with NaN in the rows that are wrong."""
    wrong = wrong_queries(spec, operands)
    if wrong is None:
        return dict(results)
    # out is [B, T, N, V], the others [B, N, T].
    of_rows = {4: wrong[..., None, None], 3: wrong[:, None]}
    return {
        name: jnp.where(of_rows[x.ndim], jnp.nan, x) if name in _MARKED else x
        for name, x in results.items()
    }


def without_wrong_lse(
    spec: AttentionSpec, operands: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """The operands of a backward call with the lse, -inf, of rows that attend nothing for NaN."""
    wrong = wrong_queries(spec, operands)
    if wrong is None:
        return dict(operands)
    return {**operands, "lse": jnp.where(wrong[:, None], -jnp.inf, operands["lse"])}
