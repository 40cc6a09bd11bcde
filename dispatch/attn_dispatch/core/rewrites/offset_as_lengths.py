"""A traced offset, or one beside lengths, as lengths, so that kernels skip what it hides.

Causality from the bottom right of a row's lengths has the offset "keys minus queries". So the keys
of a row are cut to those that its last query sees. Queries that are level with no key, because they
are past the last, see every key from the left side of the window on. They are cut off, too, and
computed by another call: with the order of queries and keys reversed, that side is causality from
the bottom right. The program runs that call only where there are such queries.

    offset 1, 4 queries, 3 keys    the first call, 2 queries    the other, reversed, window of 1
    x x .                          x x .                        . x x    x . .
    x x x                          x x x                        . . x    x x .
    x x x  past the last key
    x x x
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp

from attn_dispatch.call.operands import axis_of, changed_along
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    LENGTHS,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
    keys_as_rows,
)
from attn_dispatch.semantics.diagonal import offset_of, static_offset
from attn_dispatch.semantics.given_ids import row_lengths
from attn_dispatch.semantics.invalid_values import nan_where_invalid

_BY_PAIR = ("bias", "mask", "alibi_slopes", "dropout_key")
"""Operands that would have to be reversed as well."""


def _is_causal(spec: AttentionSpec) -> bool:
    """Whether an offset that depends on arrays, or on lengths, hides all keys to its right."""
    if spec.meaning.causal_alignment != "by_offset" or spec.is_packed or spec.is_empty:
        return False
    is_static = static_offset(spec) is not None and not spec.has_lengths
    # A window to the right is causality from a further key; ALiBi would count from there, too.
    right = spec.band[1]
    is_causal = right == 0 or (right is not None and not spec.has("alibi_slopes"))
    return is_causal and not is_static and not spec.has("window") and not spec.symbols


def _left(spec: AttentionSpec) -> int | None:
    """The left side of the window, as seen from the last key of the right side."""
    left, right = spec.band
    return None if left is None or right is None else left + right


def _is_within_kernels(spec: AttentionSpec) -> bool:
    """Whether both calls give the results, whatever the arrays hold."""
    if not _is_causal(spec) or spec.meaning.mods or any(map(spec.has, _BY_PAIR)):
        return False
    left = _left(spec)
    return left is None or (left <= spec.seq_len_kv and not spec.has("key_value_seq_lengths"))


def _inner(spec: AttentionSpec) -> AttentionSpec:
    meaning = replace(
        spec.meaning,
        causal_alignment="bottom_right",
        causal_offset=0,
        is_causal=True,
        window=(_left(spec), None),
    )
    return changed(
        spec,
        without=("causal_offset",),
        made=LENGTHS,
        meaning=meaning,
        promises=replace(spec.promises, is_checked=True),
    )


def _beside(spec: AttentionSpec) -> AttentionSpec:
    """The call of the queries past the last key, reversed."""
    inner = _inner(spec)
    as_rows = keys_as_rows(inner.meaning)
    has_side = _left(spec) is not None
    meaning = replace(as_rows, heads_first_q=False, is_causal=has_side, window=(None, None))
    return changed(inner, meaning=meaning)


@dataclass(frozen=True)
class _Rows:
    """Numbers of each batch row, int32 [B]."""

    queries: jax.Array
    keys: jax.Array
    offset: jax.Array
    """The last key that query 0 sees."""
    level: jax.Array
    """The number of queries that are level with a key, or before all of them: the first ones."""

    @staticmethod
    def of(spec: AttentionSpec, operands: NamedArrays) -> _Rows:
        queries, keys = (row_lengths(spec, operands, side) for side in ("query", "key"))
        offset = jnp.asarray(offset_of(spec, operands, lambda: 0), jnp.int32)
        offset = jnp.broadcast_to(offset.reshape(-1), queries.shape) + (spec.band[1] or 0)
        return _Rows(queries, keys, offset, jnp.clip(keys - offset, 0, queries))

    @property
    def has_past(self) -> jax.Array:
        """bool scalar: some query is past the last key."""
        return (self.level < self.queries).any()

    def lengths(self) -> NamedArrays:
        """The lengths of the first call."""
        keys = jnp.clip(self.level + self.offset, 0, self.keys)
        return dict(zip(LENGTHS, (self.level, keys), strict=True))

    def lengths_past(self, left: int | None) -> NamedArrays:
        """The lengths of the other call."""
        keys = self.keys
        if left is not None:
            keys = jnp.clip(keys - self.level - self.offset + left, 0, keys)
        return dict(zip(LENGTHS, (self.queries - self.level, keys), strict=True))

    def first(self, operands: NamedArrays) -> NamedArrays:
        """The operands of the first call."""
        return operands | self.lengths() | self._lse(operands, is_past=False)

    def past(self, operands: NamedArrays, left: int | None) -> NamedArrays:
        """The operands of the other call."""
        given = operands | self._lse(operands, is_past=True)
        given = {name: self.reversed(name, x) for name, x in given.items()}
        return given | self.lengths_past(left)

    def is_past(self, queries: int) -> jax.Array:
        """bool [B, T]: the query is past the last key."""
        return jnp.arange(queries, dtype=jnp.int32) >= self.level[:, None]

    def _lse(self, operands: NamedArrays, *, is_past: bool) -> NamedArrays:
        """lse with -inf for the queries of the other call, as a forward pass returns for padding;
        nothing in a forward pass."""
        if "lse" not in operands:
            return {}
        is_own = self.is_past(operands["lse"].shape[2]) == is_past
        return {"lse": jnp.where(is_own[:, None], operands["lse"], -jnp.inf)}

    def reversed(self, name: str, x: jax.Array) -> jax.Array:
        """The rows of an operand or result of this name in reversed order; others unchanged."""
        x = changed_along("t", name, x, lambda x: _reversed(x, self.queries))
        return changed_along("s", name, x, lambda x: _reversed(x, self.keys))


def _reversed(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """x [B, L, ...] with the first rows of each batch row in reversed order, and then the rest in
    any. Twice, it is x again."""
    number = x.shape[1]
    index = (lengths[:, None] - 1 - jnp.arange(number, dtype=jnp.int32)) % number

    def of_row(row: jax.Array, index: jax.Array) -> jax.Array:
        return row.at[index].get(mode="promise_in_bounds")

    return jax.vmap(of_row)(x, index)


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    rows, past = _Rows.of(spec, operands), _beside(spec)
    results = dict(calls.kernel(for_(inner, rows.first(operands))))
    results = {name: results[name] for name in spec.result_names}

    def with_past(results: NamedArrays) -> NamedArrays:
        found = calls.beside(past, for_(past, rows.past(operands, _left(spec))))
        return {
            name: _both(rows, name, x, rows.reversed(name, found[name]))
            for name, x in results.items()
        }

    def as_they_are(results: NamedArrays) -> NamedArrays:
        return results

    results = cast("NamedArrays", jax.lax.cond(rows.has_past, with_past, as_they_are, results))
    return results if spec.is_backward else nan_where_invalid(spec, operands, results)


def _both(rows: _Rows, name: str, x: jax.Array, past: jax.Array) -> jax.Array:
    """A result of both calls: of each query that of its call, of anything else the sum."""
    if (axis := axis_of(name, "t")) is None:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return (x.astype(wide) + past.astype(wide)).astype(x.dtype)
    is_past = rows.is_past(x.shape[axis])
    return jnp.where(is_past[:, None] if axis == -1 else is_past[..., None, None], past, x)


def _reversed_bytes(spec: AttentionSpec) -> int:
    """Bytes of the reversed operands and results."""
    held = [(x.shape, x.dtype) for x in spec.operands if _has_rows(x.name)]
    held += [(x.shape, x.dtype.name) for x in spec.results]
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in held)


def _has_rows(name: str) -> bool:
    """Whether an operand is [B, L, heads, dim], with queries or keys along L."""
    return -3 in (axis_of(name, "t"), axis_of(name, "s"))


OFFSET_AS_LENGTHS = Rewrite(
    "offset: as lengths from the bottom right; queries past the last key apart, if there are any",
    _inner,
    _compute,
    when=_is_within_kernels,
    beside=_beside,
    adds=LENGTHS,
    own_bytes=_reversed_bytes,
    needed_for="rewrites/traced_offset",
)


def _compute_if_level(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    rows = _Rows.of(spec, operands)

    def by_kernel(operands: NamedArrays) -> NamedArrays:
        results = dict(calls.kernel(for_(inner, operands | rows.lengths())))
        results = {name: results[name] for name in spec.result_names}
        return results if spec.is_backward else nan_where_invalid(spec, operands, results)

    def by_xla(operands: NamedArrays) -> NamedArrays:
        return dict(calls.xla(spec, operands))

    return cast("NamedArrays", jax.lax.cond(rows.has_past, by_xla, by_kernel, operands))


OFFSET_AS_LENGTHS_OR_XLA = Rewrite(
    "offset: as lengths from the bottom right if no query is past the last key, else XLA, decided "
    "when it runs",
    _inner,
    _compute_if_level,
    when=lambda spec: _is_causal(spec) and not _is_within_kernels(spec),
    adds=LENGTHS,
    # XLA draws another dropout mask.
    moves_dropout=True,
    may_fall_back=True,
    needed_for="rewrites/traced_offset_bias",
)
