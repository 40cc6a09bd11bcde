"""Packed sequences: the range of places of each sequence in its batch row.

Segment ids and `cu_seqlens` (int32 [B, M + 1]: sequence m of a batch row takes the places
cu_seqlens[m] … cu_seqlens[m + 1] - 1) are both turned into ranges, for every implementation.
Invalid sequences get empty ranges (row_ids.py).

No array here has two length axes: all are [B, T], [B, S] or [B, M].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.given_ids import SIDES, full_length, row_lengths
from attn_dispatch.semantics.row_ids import RowIds, cu_seqlens_of, invalid_sequences
from attn_dispatch.semantics.segment_runs import SegmentRuns


@dataclass(frozen=True)
class SequenceRanges:
    """The M sequences of every batch row as ranges of places, all inside the arrays.

    Sequence m of a batch row has the queries starts_q[m] … starts_q[m] + lengths_q[m] - 1, and keys
    likewise. Starts ascend and ranges do not overlap; an empty range starts where the next one
    does, or at the end of the row.
    """

    starts_q: jax.Array
    """int32 [B, M]."""
    lengths_q: jax.Array
    """int32 [B, M]; 0 where the sequence has no queries."""
    starts_kv: jax.Array
    lengths_kv: jax.Array
    sequence_of_query: jax.Array
    """int32 [B, T]: the query's sequence, counted from 1; 0 for padding."""
    sequence_of_key: jax.Array
    """int32 [B, S]."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> SequenceRanges:
        """The ranges of a call with cu_seqlens, with segment ids and max_segments, or without both.

        Segment id m stands for sequence m - 1. Without either, each batch row is one sequence of
        the row's length.
        """
        ids = RowIds.of(spec, operands)
        queries, keys = (_ranges(spec, operands, side) for side in SIDES)
        return SequenceRanges(*queries, *keys, ids.query, ids.key)

    @property
    def real_queries(self) -> jax.Array:
        """bool [B, T]: the query belongs to a sequence."""
        return self.sequence_of_query > 0

    @property
    def real_keys(self) -> jax.Array:
        """bool [B, S]."""
        return self.sequence_of_key > 0


def flat_starts(starts: jax.Array, length: int) -> jax.Array:
    """[B · M + 1]: the sequences' starts [B, M] after rows of `length` are laid end to end."""
    batch = starts.shape[0]
    first = length * jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.append((first + starts).reshape(-1), jnp.int32(batch * length))


def _ranges(
    spec: AttentionSpec, operands: Mapping[str, jax.Array], side: str
) -> tuple[jax.Array, jax.Array]:
    """Starts and lengths [B, M] of the sequences."""
    if spec.has("cu_seqlens_q"):
        cu_seqlens = cu_seqlens_of(spec, operands, side)
        lengths = jnp.where(invalid_sequences(spec, operands), 0, jnp.diff(cu_seqlens, axis=1))
        return cu_seqlens[:, :-1], lengths
    if spec.has("query_segment_ids"):
        if spec.meaning.max_segments is None:
            raise ValueError("SequenceRanges: expected max_segments with segment ids, got None")
        return SegmentRuns.of(spec, operands).ranges(side, full_length(spec, side))
    lengths = row_lengths(spec, operands, side)[:, None]
    return jnp.zeros_like(lengths), lengths
