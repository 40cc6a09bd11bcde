"""The dropout mask: a function of key, position and shape alone, drawn for one block at a time.

The caller's key may be of any implementation, but it only draws a Threefry key; everything else
is Threefry, whose draws are the same batched and unbatched. ("rbg" keys differ under `vmap`.)
Each query row of each head and batch row has its own key, so a block draws what the whole would,
and so does one of the devices that a call is shared out to.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.spec import AttentionSpec

_IMPL = "threefry2x32"


def dropout_head_keys(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array | None:
    """Threefry key data, uint32 [B, N, 2]: a key per batch row and head. None without dropout."""
    if not spec.options.dropout_rate or not spec.has("dropout_key"):
        return None
    b, n, d = spec.batch, spec.num_heads, spec.shape("dropout_key")[0]

    starts = operands.get("dropout_start", jnp.zeros((d, 2), jnp.int32))
    rows, heads = (jnp.arange(x, dtype=jnp.int32) for x in (b // d, n))

    def head_keys(key_and_start: tuple[jax.Array, jax.Array]) -> jax.Array:
        key_data, (row, head) = key_and_start
        key = jax.random.wrap_key_data(key_data, impl=spec.options.dropout_impl)
        words = jax.random.bits(key, (2,), jnp.uint32)
        return _fold_in(_fold_in(words, row + rows), head + heads)

    # One after the other, mapped or not: each key draws as it would alone.
    alone = jax.custom_batching.sequential_vmap(head_keys)
    return lax.map(alone, (operands["dropout_key"], starts)).reshape(b, n, 2)


def dropout_keep_mask(
    spec: AttentionSpec, head_keys: jax.Array, start: jax.Array | int, size: int
) -> jax.Array:
    """True where a probability is kept, for query rows start … start + size - 1.

    `head_keys` are those of `dropout_head_keys`, or some batch rows and heads of them, [b, n, 2].
    Returns bool [b, n, size, S].
    """
    b, n, _ = head_keys.shape
    keys = _fold_in(head_keys, start + jnp.arange(size))

    def one_row(key_data: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl=_IMPL)
        # A flat draw: XLA takes ten times as long to compile one of several axes for the CPU.
        return jax.random.bits(key, (spec.seq_len_kv,), jnp.uint32)

    bits = jax.vmap(one_row)(keys.reshape(b * n * size, 2))
    dropped_below = min(round(spec.options.dropout_rate * 2**32), 2**32 - 1)
    return (bits >= jnp.uint32(dropped_below)).reshape(b, n, size, spec.seq_len_kv)


def _fold_in(key_data: jax.Array, numbers: jax.Array) -> jax.Array:
    """A key for each key and number: uint32 [..., 2] and [M] to [..., M, 2]."""

    def fold_in(key_data: jax.Array, number: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl=_IMPL)
        return jax.random.key_data(jax.random.fold_in(key, number))

    of_one = jax.vmap(fold_in, (None, 0))
    keys = jax.vmap(of_one, (0, None))(key_data.reshape(-1, 2), numbers.astype(jnp.uint32))
    return keys.reshape(*key_data.shape[:-1], numbers.shape[0], 2)
