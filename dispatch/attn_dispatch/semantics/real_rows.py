"""Real rows: queries that attend to some key, and keys of a sequence that has queries.

All other rows are padding rows. Kernels leave their results unspecified; here their output and
gradients are 0 and their lse is -inf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.call.features import features_of
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.diagonal import offset_of, static_offset
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.packing import SequenceRanges
from attn_dispatch.semantics.positions import Positions

NO_WEIGHT = 1e30
"""The lse that a kernel's backward pass is given for a padding row, so that exp(score - lse) is 0
for every score, a sink's as well."""


@dataclass(frozen=True)
class RealRows:
    """Masks of the real rows; None where all rows are real."""

    queries: jax.Array | None
    """bool [1|B, 1|N, T]."""
    keys: jax.Array | None
    """bool [B, S]."""

    @staticmethod
    def of(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> RealRows:
        """From lengths, sequences, window, mask and bias; mask and bias are read once for it."""
        queries, keys = real_rows_by_position(spec, operands)
        by_scores = _by_scores(spec, operands)
        if by_scores is not None:
            return RealRows(by_scores, keys)
        return RealRows(None if queries is None else queries[:, None], keys)


def real_rows_by_position(
    spec: AttentionSpec, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Real queries, bool [1|B, T], and keys, [B, S], from lengths, sequences and window alone.

    Segment ids need max_segments.
    """
    if not spec.has_runtime_lengths:
        return _by_band(spec, operands), None
    ranges = SequenceRanges.of(spec, operands)
    of_query, of_key = ranges.sequence_of_query, ranges.sequence_of_key
    if sees_its_own_key(spec):
        return of_query > 0, of_key > 0
    position = _iota(spec.seq_len_q) - _pick(ranges.starts_q, of_query)
    length_q, length_kv = (_pick(x, of_query) for x in (ranges.lengths_q, ranges.lengths_kv))
    queries = (of_query > 0) & _attends(
        spec, position + offset_of(spec, operands, lambda: length_kv - length_q), length_kv
    )
    keys = (of_key > 0) & (_pick(ranges.lengths_q, of_key) > 0)
    return queries, keys


def sees_its_own_key(spec: AttentionSpec) -> bool:
    """Whether each query of a sequence attends to the key at its own position, which is there."""
    left, right = spec.band
    has_own = (left is None or left >= 0) and (right is None or right >= 0)
    return spec.meaning.same_lengths and static_offset(spec) == 0 and has_own


def _attends(spec: AttentionSpec, diagonal: jax.Array, length_kv: jax.Array) -> jax.Array:
    """Whether the query that is level with key `diagonal` has a key inside its window."""
    left, right = spec.band
    first = jnp.int32(0) if left is None else jnp.maximum(diagonal - left, 0)
    last = length_kv - 1
    if right is not None:
        last = jnp.minimum(diagonal + right, last)
    return first <= last


def may_have_padding(spec: AttentionSpec) -> bool:
    """Whether lengths, sequences or the window may leave some query without a key."""
    return spec.has_runtime_lengths or not _reaches_all_rows(spec)


def each_query_attends(spec: AttentionSpec) -> bool:
    """Whether every query attends to some key whatever the arrays hold.

    Then no lse is -inf, unless products of query and key exceed float32's range.
    """
    return set(features_of(spec)) <= _NO_PADDING_ROWS and _reaches_all_rows(spec)


_NO_PADDING_ROWS = {
    "causality and windows", "causal_alignment as a number", "dropout", "the gradient of lse",
    "the row maximum",
}  # fmt: skip
"""Features that make no query a padding row, unless the window does."""


def leading_padding_rows(spec: AttentionSpec) -> int:
    """The number of leading queries that causality from the bottom right leaves without a key; 0
    if that depends on lengths known at run time only."""
    is_bottom_right = spec.meaning.causal_alignment == "bottom_right"
    if not spec.meaning.is_causal or not is_bottom_right or spec.has_runtime_lengths:
        return 0
    return max(spec.seq_len_q - spec.seq_len_kv, 0)


def _by_band(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array | None:
    """Real queries of a call without lengths, from its window; None if all queries see a key."""
    if _reaches_all_rows(spec):
        return None
    t, s = spec.seq_len_q, spec.seq_len_kv
    offset = offset_of(spec, operands, lambda: jnp.int32(s) - jnp.int32(t))
    return _attends(spec, _iota(t) + offset, jnp.int32(s))


def _reaches_all_rows(spec: AttentionSpec) -> bool:
    left, right = spec.band
    t, s = spec.seq_len_q, spec.seq_len_kv
    offset = static_offset(spec)
    if offset is None:
        return (left, right) == (None, None)
    starts_late = right is not None and offset + right < 0
    ends_early = left is not None and t - 1 + offset - left > s - 1
    return not starts_late and not ends_early


def _by_scores(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array | None:
    """Real queries by mask and bias, which are read once; None without either."""
    if not spec.has("mask") and not spec.has("bias"):
        return None
    positions = Positions.of(spec, operands)
    may_attend = allowed(spec, operands, positions)
    if spec.has("bias"):
        # NaN does not hide a pair: it has to appear in the results.
        is_in = operands["bias"] != -jnp.inf
        may_attend = is_in if may_attend is None else may_attend & is_in
    assert may_attend is not None
    rows = may_attend.any(axis=3)
    return jnp.broadcast_to(rows, (*rows.shape[:2], spec.seq_len_q))


def _pick(per_sequence: jax.Array, sequence: jax.Array) -> jax.Array:
    """The value of each place's sequence, [B, L]; unspecified for places in no sequence."""
    return jnp.take_along_axis(per_sequence, jnp.maximum(sequence - 1, 0), axis=1)


def _iota(length: int) -> jax.Array:
    return jnp.arange(length, dtype=jnp.int32)[None, :]
