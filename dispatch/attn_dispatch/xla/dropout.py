"""The dropout mask: a function of key, position and shape alone, drawn for a few rows at a time.

The caller's key may be of any implementation, but it only draws a Threefry key; everything else
is Threefry, whose draws are the same batched and unbatched. ("rbg" keys differ under `vmap`.)
Each query row has its own key, so a chunk of rows draws what the whole would.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec

_IMPL = "threefry2x32"


def dropout_row_keys(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array | None:
    """Threefry key data, uint32 [D, T, 2]: a key per query row. None without dropout."""
    if not spec.options.dropout_rate or not spec.has("dropout_key"):
        return None

    def row_keys(key_data: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl=spec.options.dropout_impl)
        key = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl=_IMPL)
        rows = jnp.arange(spec.seq_len_q, dtype=jnp.uint32)
        return jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, rows))

    # lax.map and not vmap: each key draws as it would alone.
    return lax.map(row_keys, operands["dropout_key"])


def dropout_keep_mask(
    spec: AttentionSpec, row_keys: jax.Array, start: jax.Array | int, size: int
) -> jax.Array:
    """True where a probability is kept, for query rows start … start + size - 1.

    `row_keys` are those of `dropout_row_keys`. Returns bool [B, N, size, S].
    """
    b, n, s = spec.batch, spec.num_heads, spec.seq_len_kv
    d = row_keys.shape[0]
    keys = lax.dynamic_slice_in_dim(row_keys, start, size, axis=1).reshape(d * size, 2)

    def one_row(key_data: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl=_IMPL)
        # A flat draw: XLA takes ten times as long to compile one of several axes for the CPU.
        return jax.random.bits(key, (b // d * n * s,), jnp.uint32)

    bits = jax.vmap(one_row)(keys).reshape(d, size, b // d, n, s)
    dropped_below = min(round(spec.options.dropout_rate * 2**32), 2**32 - 1)
    keep = bits >= jnp.uint32(dropped_below)
    return jnp.moveaxis(keep, 1, 3).reshape(b, n, size, s)
