"""The backward pass of a bottom-right window, with queries and keys moved to the main diagonal.

cuDNN's backward pass skips the keys left of a window that is counted from the top left, but no keys
of one that is counted from the bottom right. 65,536 queries on 131,072 keys in a window of 4,096
take 690 ms forward and backward, with or without lengths, and 34 or 33 ms with this rewrite (H200,
cuDNN 9.19; benchmarks/results/window_with_lengths-*).

The rewrite copies the keys that the window reaches, and moves each query to the row of the key on
its diagonal. Rows before the first query are zeros, whose gradients are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from attn_dispatch.call.operands import changed_along
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import (
    BACKWARD,
    LENGTHS,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
    keys_as_rows,
)
from attn_dispatch.semantics.given_ids import row_lengths
from attn_dispatch.semantics.real_rows import NO_WEIGHT
from attn_dispatch.semantics.wider_arrays import round_up

_REFUSED = ("bias", "mask", "window", "alibi_slopes", "dropout_key")
"""Operands with which the rewrite does not apply: those over pairs, and those with which the kernel
counts from the top left already."""

_TILE = 128
"""The number of rows added before the queries is a multiple of this."""
_COPIED_ROW = 300
"""The number of pairs that take as long as copying a row. Estimated from
benchmarks/results/window_with_lengths-NVIDIA_H200-*: 30 ns a row, 0.1 ns a pair."""
_LEAST_SAVED = 1.5
"""The least ratio of the kernel's work without and with this rewrite. It is more than 1 because
lengths may reduce the work without it."""


def _when(spec: AttentionSpec) -> bool:
    left, right = spec.band
    # A query whose diagonal lies before the first key must see no key, so the window may not extend
    # to the right.
    if spec.meaning.causal_alignment != "bottom_right" or left is None or right != 0:
        return False
    if spec.is_packed or spec.is_empty or spec.meaning.mods or any(map(spec.has, _REFUSED)):
        return False
    cost = _cost(_rows(spec, left), left)
    return _LEAST_SAVED * cost <= _all_left(spec.seq_len_q, spec.seq_len_kv)


def _inner(spec: AttentionSpec) -> AttentionSpec:
    left = spec.band[0]
    assert left is not None
    rows, has_lengths = _rows(spec, left), any(map(spec.has, LENGTHS))
    as_rows = keys_as_rows(spec.meaning)
    meaning = replace(as_rows, heads_first_q=False, causal_alignment="top_left")
    return changed(
        spec,
        sizes={"t": rows, "s": rows},
        made=LENGTHS if has_lengths else (),
        meaning=meaning,
        same_lengths=has_lengths,
    )


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    rows = inner.seq_len_q
    queries, keys = (row_lengths(spec, operands, side) for side in ("query", "key"))
    first_key = jnp.maximum(keys - rows, 0)
    first_query = first_key - (keys - queries)

    def moved(name: str, x: jax.Array, *, is_result: bool = False) -> jax.Array:
        """The rows of an operand at their places in the inner call; those of a result back."""
        filler, sizes = NO_WEIGHT if name == "lse" else 0, (spec if is_result else inner).sizes

        def part(letter: str, first: jax.Array) -> Callable[[jax.Array], jax.Array]:
            return lambda x: _part(x, -first if is_result else first, sizes[letter], filler)

        x = changed_along("t", name, x, part("t", first_query))
        return changed_along("s", name, x, part("s", first_key))

    given = {name: moved(name, x) for name, x in operands.items()}
    given |= dict.fromkeys(LENGTHS, jnp.minimum(keys, rows))
    results = calls.kernel(for_(inner, given))
    return {name: moved(name, x, is_result=True) for name, x in results.items()}


def _rows(spec: AttentionSpec, left: int) -> int:
    """The number of rows from the first key that some query sees to the last key."""
    return min(spec.seq_len_q + round_up(left, _TILE), spec.seq_len_kv)


def _cost(rows: int, left: int) -> int:
    """The cost of the rewrite in pairs: those in the window, and the copies of rows."""
    width = min(left + 1, rows)
    return rows * width - width * (width - 1) // 2 + _COPIED_ROW * rows


def _all_left(t: int, s: int) -> int:
    """The number of pairs of T queries, on the diagonal from the bottom right of S keys, with every
    key up to the diagonal."""
    first = max(s - t, 0)
    return t * first + (s - first) * (s - first + 1) // 2


def _part(x: jax.Array, first: jax.Array, rows: int, filler: float = 0) -> jax.Array:
    """`rows` rows of x [B, L, ...] from row `first` [B] on, with `filler` where x has no row."""
    at = first[:, None] + jnp.arange(rows, dtype=jnp.int32)
    at = jnp.where(at < 0, x.shape[1], at)  # an index below 0 counts from the end

    def rows_of(row: jax.Array, i: jax.Array) -> jax.Array:
        return row.at[i].get(mode="fill", fill_value=filler)

    return jax.vmap(rows_of)(x, at)


ONE_DIAGONAL = Rewrite(
    "window from the bottom right: queries and keys on one diagonal",
    _inner,
    _compute,
    asked_of=BACKWARD,
    adds=LENGTHS,
    when=_when,
    moves_dropout=True,
)
