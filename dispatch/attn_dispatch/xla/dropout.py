"""The dropout mask: a function of key, position and shape alone, drawn for one block at a time.

The caller's key may be of any implementation; if it is not a Threefry key, it draws one. All other
draws are Threefry's, which are the same batched and unbatched ("rbg" draws differ under `vmap`).
Each batch row and head gets a different key, which hashes the indices of query row and key. So a
block, or one of several devices, draws its part of the whole call's mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.typed_jax import bind, mapped, wrapped_key

_IMPL = "threefry2x32"

_OURS = 2**31
"""Added to batch rows: jax.random.split and fold_in of the same key never use such counters."""


def dropout_head_keys(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array | None:
    """Threefry key data, uint32 [B, N, 2], one key per batch row and head; None without dropout."""
    if not spec.meaning.dropout_rate or not spec.has("dropout_key"):
        return None
    b, n, d = spec.batch, spec.num_heads, spec.shape("dropout_key")[0]
    keys = _threefry_keys(operands["dropout_key"], spec.meaning.dropout_impl)
    starts = operands.get("dropout_start", jnp.zeros((d, 2), jnp.int32))

    def of_one(key: jax.Array, start: jax.Array) -> jax.Array:
        rows = start[0] + jnp.arange(b // d, dtype=jnp.int32)
        heads = start[1] + jnp.arange(n, dtype=jnp.int32)
        x, y = _all_pairs(rows, heads)
        return _hash(key[None], x + jnp.uint32(_OURS), y)

    return jax.vmap(of_one)(keys, starts).reshape(b, n, 2)


def dropout_keep_mask(
    spec: AttentionSpec, head_keys: jax.Array, start: jax.Array | int, size: int
) -> jax.Array:
    """True where a probability is kept, for query rows start … start + size - 1.

    `head_keys` [b, n, 2] are the keys of `dropout_head_keys`, or of a block's batch rows and heads.
    Returns bool [b, n, size, S].
    """
    b, n, _ = head_keys.shape
    num_pairs = (spec.seq_len_kv + 1) // 2
    rows, pairs = start + jnp.arange(size), jnp.arange(num_pairs)
    # A hash has two words: one for an even key, one for the key after it.
    words = _hash(head_keys.reshape(b * n, 2), *_all_pairs(rows, pairs))
    bits = words.reshape(b, n, size, 2 * num_pairs)[..., : spec.seq_len_kv]
    dropped_below = min(round(spec.meaning.dropout_rate * 2**32), 2**32 - 1)
    return bits >= jnp.uint32(dropped_below)


def _threefry_keys(key_data: jax.Array, impl: str | None) -> jax.Array:
    """A Threefry key for each key of implementation `impl`, uint32 [D, ·] to [D, 2]."""
    if impl == _IMPL:
        return key_data

    def words(key_data: jax.Array) -> jax.Array:
        return jax.random.bits(wrapped_key(key_data, impl), (2,), jnp.uint32)

    # One after the other, under vmap too: each key draws as it would alone.
    one_by_one = cast(
        "Callable[[jax.Array], jax.Array]", jax.custom_batching.sequential_vmap(words)
    )
    return mapped(one_by_one, key_data)


def _hash(keys: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Threefry hashes of the pairs (x, y) under each key: uint32 [M, 2] and [L] to [M, L, 2]."""

    def of_one(key: jax.Array) -> jax.Array:
        return jnp.stack(bind(threefry2x32_p, key[0], key[1], x, y), axis=-1)

    return jax.vmap(of_one)(keys)


def _all_pairs(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Every x with every y, as uint32; y varies fastest."""
    xs, ys = jnp.meshgrid(x.astype(jnp.uint32), y.astype(jnp.uint32), indexing="ij")
    return xs.ravel(), ys.ravel()
