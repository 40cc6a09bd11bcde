"""FlashAttention-4's compiled kernels in plain JAX, which XLA can split over devices.

Pairs of tiles that no list names are not seen, and in those listed as full all are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def forward(tile: tuple[int, int], q: Any, k: Any, v: Any, rows: Any, lists: Any, scale: float):
    """out [B, T, N, V] and lse [B, N, T], for tiles of (queries, keys)."""
    seen = _seen(tile, rows, lists, k.shape[1], is_backward=False)
    return _attention(q, k, v, seen, scale)


def backward(tile: tuple[int, int], operands: Any, rows: Any, lists: Any, scale: float):
    """The gradients of q, k and v from (q, k, v, out, lse, out_grad, lse_grad)."""
    q, k, v, _, _, out_grad, lse_grad = operands
    seen = _seen(tile, rows, lists, k.shape[1], is_backward=True)
    _, pull = jax.vjp(lambda *x: _attention(*x, seen, scale), q, k, v)
    return pull((out_grad, lse_grad))


def _attention(q: Any, k: Any, v: Any, seen: jax.Array, scale: float) -> tuple[Any, Any]:
    dtype, (q, k, v) = q.dtype, (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.where(seen[:, None], scale * jnp.einsum("btnh,bsnh->bnts", q, k), -1e30)
    top = scores.max(axis=3, keepdims=True)
    weights = jnp.where(seen[:, None], jnp.exp(scores - top), 0)
    total = weights.sum(axis=3, keepdims=True)
    out = jnp.einsum("bnts,bsnv->btnv", weights / jnp.where(total > 0, total, 1), v)
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    return out.astype(dtype), lse[..., 0]


def _seen(
    tile: tuple[int, int], rows: Any, lists: Any, keys: int, *, is_backward: bool
) -> jax.Array:
    """bool [1|B, T, S]."""
    queries = rows.shape[1]
    key = jnp.arange(keys)
    a, length_a, b, length_b = (rows[..., i : i + 1] for i in range(4))
    may_attend = ((a <= key) & (key < a + length_a)) | ((b <= key) & (key < b + length_b))
    partial_counts, partial, full_counts, full = lists

    def pairs(counts: Any, indices: Any) -> jax.Array:
        length, side = (queries, tile[0]) if is_backward else (keys, tile[1])
        number = jnp.arange(-(-length // side))
        is_listed = jnp.arange(indices.shape[3]) < counts[:, 0, :, None]
        tiles = ((indices[:, 0, :, :, None] == number) & is_listed[..., None]).any(axis=2)
        tiles = tiles.swapaxes(1, 2) if is_backward else tiles
        whole = jnp.repeat(jnp.repeat(tiles, tile[0], axis=1), tile[1], axis=2)
        return whole[:, :queries, :keys]

    return (may_attend & pairs(partial_counts, partial)) | pairs(full_counts, full)
