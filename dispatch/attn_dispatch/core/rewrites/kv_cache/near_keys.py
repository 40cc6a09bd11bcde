"""A window that covers a small part of a cache: only the keys in the window are copied.

Otherwise kernels would plan for all keys that the cache has room for, and kernels made for decoding
do not support windows.
"""

from __future__ import annotations

import jax.numpy as jnp

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.kv_cache.blocks import IN_BLOCKS
from attn_dispatch.core.rewrites.kv_cache.few_queries import MAX_QUERIES
from attn_dispatch.core.rewrites.rewrite import (
    CACHE,
    Calls,
    NamedArrays,
    Rewrite,
    changed,
    for_,
    keys_as_rows,
    without_band,
)
from attn_dispatch.semantics.given_ids import row_lengths
from attn_dispatch.semantics.invalid_values import nan_where_invalid
from attn_dispatch.semantics.pages import keys_at

_LEAST_SAVED = 4
"""The least ratio of all keys to those copied. A copy reads and writes what a kernel only reads."""

_REFUSED = ("bias", "mask", "window", "dropout_key")
"""Operands with which the rewrite does not apply."""


def _when(spec: AttentionSpec) -> bool:
    left, right = spec.band
    if left is None or right not in (None, 0) or spec.meaning.causal_alignment != "bottom_right":
        return False
    if not spec.has("key_value_seq_lengths") or spec.is_packed or spec.is_empty:
        return False
    if any(map(spec.has, _REFUSED)) or spec.meaning.mods or spec.wanted.needs_keep:
        return False
    least = _LEAST_SAVED
    if spec.seq_len_q > MAX_QUERIES:
        if not spec.is_paged:
            return False  # kernels run this call on the array as a packed one
        least = 1  # without this rewrite, all pages would be copied
    return _reached(spec, left) * least <= spec.seq_len_kv


def _reached(spec: AttentionSpec, left: int) -> int:
    """The number of keys that the queries of a row see between them."""
    return left + spec.seq_len_q


def _inner(spec: AttentionSpec) -> AttentionSpec:
    left = spec.band[0]
    assert left is not None
    meaning = without_band(spec.meaning) if spec.seq_len_q == 1 else spec.meaning
    return changed(
        spec,
        without=IN_BLOCKS,
        sizes={"s": _reached(spec, left)},
        made=("key", "value"),
        meaning=keys_as_rows(meaning),
    )


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    keys = row_lengths(spec, operands, "key")
    first = jnp.maximum(keys - inner.seq_len_kv, 0)
    places = first[:, None] + jnp.arange(inner.seq_len_kv, dtype=jnp.int32)[None]
    key, value = keys_at(spec, operands, places)
    near = {"key": key, "value": value, "key_value_seq_lengths": keys - first}
    results = calls.kernel(for_(inner, {**operands, **near}))
    return nan_where_invalid(spec, operands, results)


NEAR_KEYS = Rewrite(
    "window: the keys that it may reach, copied",
    _inner,
    _compute,
    asked_of=CACHE,
    adds=("key", "value"),
    when=_when,
)
