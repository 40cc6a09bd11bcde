"""Packed sequences as a padded batch, for kernels that do not take packed arrays.

Each sequence becomes a batch row with lengths. Padding costs a kernel little time, because it skips
what lies past a length, but it costs memory. So if the padded sequences together would have more
pairs than a mask over all pairs, `as_mask_or_bias.py` makes that mask instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    LENGTHS,
    SEQUENCE_OPERANDS,
    SEQUENCES,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
)
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.packing import SequenceRanges

_QUERY_ROWS = ("query", "out", "out_grad")
_KEY_ROWS = ("key", "value")
_ROWS_BY_HEAD = ("lse", "lse_grad", "row_max")
"""Arrays [B, N, T]."""
_OF_BATCH_ROW = ("alibi_slopes", "sinks", "causal_offset")
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


def _arrays(spec: AttentionSpec) -> dict[str, tuple[tuple[int, ...], str]]:
    t, s = spec.longest_sequences
    batch = spec.batch * _number(spec)
    arrays: dict[str, tuple[tuple[int, ...], str]]
    arrays = {name: ((batch,), "int32") for name in LENGTHS}
    for x in spec.operands:
        if x.name in _QUERY_ROWS + _KEY_ROWS:
            length = t if x.name in _QUERY_ROWS else s
            arrays[x.name] = ((batch, length, *x.shape[2:]), x.dtype)
        elif x.name in _ROWS_BY_HEAD:
            arrays[x.name] = ((batch, x.shape[1], t), x.dtype)
        elif x.name in _OF_BATCH_ROW and x.shape[0] > 1:
            arrays[x.name] = ((batch, *x.shape[1:]), x.dtype)
    return arrays


def _inner(spec: AttentionSpec) -> AttentionSpec:
    return changed(
        spec,
        without=tuple(x for x in SEQUENCE_OPERANDS if x not in LENGTHS),
        arrays=_arrays(spec),
        meaning=replace(spec.meaning, max_segments=None, max_seq_lens=None),
    )


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    ranges = SequenceRanges.of(spec, operands)
    queries = _Places(ranges.starts_q, ranges.lengths_q, ranges.sequence_of_query, inner.seq_len_q)
    keys = _Places(ranges.starts_kv, ranges.lengths_kv, ranges.sequence_of_key, inner.seq_len_kv)
    given = operands | {
        "query_seq_lengths": ranges.lengths_q.reshape(-1),
        "key_value_seq_lengths": ranges.lengths_kv.reshape(-1),
    }
    given |= _padded(spec, operands, queries, keys)
    results = dict(calls.kernel(for_(inner, given)))
    results |= _packed(spec, results, queries, keys)
    return results if spec.is_backward else nan_where_invalid(spec, operands, results)


def _padded(
    spec: AttentionSpec, operands: NamedArrays, queries: _Places, keys: _Places
) -> NamedArrays:
    """The operands whose rows the inner call has in padded arrays."""
    given: NamedArrays = {}
    for name, x in operands.items():
        if name in _QUERY_ROWS:
            given[name] = queries.padded(x)
        elif name in _KEY_ROWS:
            given[name] = keys.padded(x)
        elif name in _ROWS_BY_HEAD:
            given[name] = jnp.swapaxes(queries.padded(jnp.swapaxes(x, 1, 2)), 1, 2)
        elif name in _OF_BATCH_ROW and x.shape[0] > 1:
            given[name] = jnp.repeat(x, _number(spec), axis=0)
    return given


def _packed(
    spec: AttentionSpec, results: NamedArrays, queries: _Places, keys: _Places
) -> NamedArrays:
    """The results of the inner call that the call has in packed arrays, or by batch row."""
    found: NamedArrays = {}
    for name, x in results.items():
        if name in _QUERY_ROWS:
            found[name] = queries.packed(x, 0)
        elif name in _KEY_ROWS:
            found[name] = keys.packed(x, 0)
        elif name in _ROWS_BY_HEAD:
            by_row = queries.packed(jnp.swapaxes(x, 1, 2), -jnp.inf)
            found[name] = jnp.swapaxes(by_row, 1, 2)
        elif name == "keep":
            by_row = queries.packed(jnp.swapaxes(x, 1, 2), True)  # [B, T, N, S']
            found[name] = jnp.swapaxes(keys.columns(by_row), 1, 2)
        elif x.shape[0] > spec.shape(name)[0]:
            found[name] = x.reshape(spec.batch, _number(spec), -1).sum(axis=1)
    return found


PACKED_AS_PADDED = Rewrite(
    "packed sequences: as a padded batch of them",
    _inner,
    _compute,
    asked_of=SEQUENCES,
    adds=LENGTHS,
    when=_when,
    pairs=lambda spec: tuple(shape for shape, _ in _arrays(spec).values()),
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
