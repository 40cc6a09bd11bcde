"""Packed sequences as a padded batch, for kernels that do not take packed arrays.

Each sequence becomes a batch row with lengths. Padding costs a kernel little time, because it skips
what lies past a length, but it costs memory. So if the padded sequences together would have more
pairs than a mask over all pairs, `as_mask_or_bias.py` makes that mask instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.operands import changed_along
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    LENGTHS,
    SEQUENCE_OPERANDS,
    SEQUENCES,
    UNSEEN,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
)
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.packing import SequenceRanges

_REFUSED = ("bias", "mask", "window")
"""Operands with which the rewrite does not apply: those over pairs, which would have to be divided
too, and window, which has a batch row."""


def _when(spec: AttentionSpec) -> bool:
    # A mod's b would become the number of the sequence.
    if not spec.is_packed or any(map(spec.has, _REFUSED)) or spec.meaning.mods:
        return False
    number = spec.most_sequences
    t, s = spec.longest_sequences
    return bool(number) and number * t * s <= spec.seq_len_q * spec.seq_len_kv


def _number(spec: AttentionSpec) -> int:
    """The number of padded rows for each batch row of a call to which the rewrite applies."""
    number = spec.most_sequences
    assert number is not None
    return number


def _inner(spec: AttentionSpec) -> AttentionSpec:
    t, s = spec.longest_sequences
    return changed(
        spec,
        without=tuple(x for x in SEQUENCE_OPERANDS if x not in LENGTHS),
        sizes={"b": spec.batch * _number(spec), "t": t, "s": s},
        made=LENGTHS,
        meaning=replace(spec.meaning, max_segments=None, max_seq_lens=None),
    )


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    ranges = SequenceRanges.of(spec, operands)
    queries = _Places(ranges.starts_q, ranges.lengths_q, ranges.sequence_of_query, inner.seq_len_q)
    keys = _Places(ranges.starts_kv, ranges.lengths_kv, ranges.sequence_of_key, inner.seq_len_kv)
    given = {name: x for name, x in operands.items() if inner.has(name)} | {
        "query_seq_lengths": ranges.lengths_q.reshape(-1),
        "key_value_seq_lengths": ranges.lengths_kv.reshape(-1),
    }

    def padded(name: str, x: jax.Array) -> jax.Array:
        x = changed_along("t", name, x, queries.padded)
        x = changed_along("s", name, x, keys.padded)
        batch = inner.shape(name)[0]
        return x if x.shape[0] == batch else jnp.repeat(x, _number(spec), axis=0)

    def packed(name: str, x: jax.Array) -> jax.Array:
        padding = UNSEEN.get(name, 0)
        if name == "keep":
            return changed_along("t", name, x, lambda x: keys.columns(queries.packed(x, padding)))
        x = changed_along("t", name, x, lambda x: queries.packed(x, padding))
        x = changed_along("s", name, x, lambda x: keys.packed(x, 0))
        if spec.is_backward and x.shape[0] > spec.shape(name)[0]:
            x = x.reshape(spec.batch, _number(spec), -1).sum(axis=1)
        return x

    results = calls.kernel(for_(inner, {name: padded(name, x) for name, x in given.items()}))
    results = {name: packed(name, x) for name, x in results.items()}
    return results if spec.is_backward else nan_where_invalid(spec, operands, results)


PACKED_AS_PADDED = Rewrite(
    "packed sequences: as a padded batch of them",
    _inner,
    _compute,
    asked_of=SEQUENCES,
    adds=LENGTHS,
    when=_when,
    pairs=lambda spec: tuple(x.shape for x in _inner(spec).operands),
    moves_dropout=True,
)


@dataclass(frozen=True)
class _Places:
    """The places of queries, or of keys, in packed [B, L] and in padded arrays [B · M, R]."""

    starts: jax.Array
    """int32 [B, M], the place in the packed array where each sequence begins."""
    lengths: jax.Array
    """int32 [B, M], the length of each sequence."""
    sequence: jax.Array
    """int32 [B, L], the sequence at each place, counted from 1; 0 in padding."""
    longest: int
    """R, the length of the padded rows."""

    def padded(self, x: jax.Array) -> jax.Array:
        """The packed array x [B, L, ...] as [B · M, R, ...], with 0 past the end of a sequence."""
        within = jnp.arange(self.longest, dtype=jnp.int32)[None, None, :]
        place = self.starts[:, :, None] + within
        is_inside = within < self.lengths[:, :, None]
        batch, number = self.starts.shape
        rows = _take(x, jnp.where(is_inside, place, 0).reshape(batch, -1))
        rows = jnp.where(_like(is_inside.reshape(batch, -1), rows), rows, 0)
        return rows.reshape(batch * number, self.longest, *x.shape[2:])

    def packed(self, x: jax.Array, padding: float | bool) -> jax.Array:
        """The padded array x [B · M, R, ...] as [B, L, ...], `padding` outside of sequences."""
        batch, number = self.starts.shape
        rows = x.reshape(batch, number * self.longest, *x.shape[2:])
        index = jnp.maximum(self.sequence - 1, 0)
        rows = _take(rows, jnp.where(self.sequence > 0, index * self.longest + self._within(), 0))
        return jnp.where(_like(self.sequence > 0, rows), rows, padding)

    def columns(self, x: jax.Array) -> jax.Array:
        """x [B, T, N, R], over the keys of each query's sequence, as [B, T, N, L] over all keys."""
        within = jnp.clip(self._within(), 0, self.longest - 1)
        return jnp.take_along_axis(x, within[:, None, None, :], axis=3)

    def _within(self) -> jax.Array:
        """int32 [B, L]: the position of each place within its sequence."""
        starts = jnp.take_along_axis(self.starts, jnp.maximum(self.sequence - 1, 0), axis=1)
        return jnp.arange(self.sequence.shape[1], dtype=jnp.int32)[None, :] - starts


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """The rows of x [B, L, ...] at `index` [B, R] within each batch row."""

    def rows_of(rows: jax.Array, at: jax.Array) -> jax.Array:
        return rows[at]

    return jax.vmap(rows_of)(x, index)


def _like(condition: jax.Array, x: jax.Array) -> jax.Array:
    """The condition [B, L] with axes of 1 added, so that it broadcasts against x [B, L, ...]."""
    return condition.reshape(*condition.shape, *(1,) * (x.ndim - condition.ndim))
