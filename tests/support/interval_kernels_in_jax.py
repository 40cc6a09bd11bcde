"""FlashAttention-4's compiled kernels in plain JAX, which XLA can split over devices.

Pairs of tiles that no list names are not seen, and in those listed as full all are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def forward(
    tile: tuple[int, int],
    q: Any,
    k: Any,
    v: Any,
    rows: Any,
    lists: Any,
    scale: float,
    sinks: Any = None,
):
    """out [B, T, N, V] and lse [B, N, T], for tiles of (queries, keys)."""
    seen = _seen(tile, rows, lists, k.shape[1], is_backward=False)
    out, lse = _attention(q, k, v, seen, scale)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def with_sinks(out: Any, lse: Any, sinks: Any) -> tuple[Any, Any]:
    """The results with sinks [1|B, N], where a row sees a key."""
    sinks = sinks.astype(jnp.float32)[:, :, None]
    whole = jnp.where(lse == -jnp.inf, lse, jnp.logaddexp(lse, sinks))
    share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - jnp.where(lse == -jnp.inf, 0, whole)))
    return (out * share.swapaxes(1, 2)[..., None]).astype(out.dtype), whole


def backward(tile: tuple[int, int], operands: Any, rows: Any, lists: Any, scale: float):
    """The gradients of q, k and v from (q, k, v, out, lse, out_grad, lse_grad), and each row's
    Σ out · out_grad - lse_grad."""
    q, k, v, out, lse, out_grad, lse_grad = (x.astype(jnp.float32) for x in operands)
    group = q.shape[2] // k.shape[2]
    seen = _seen(tile, rows, lists, k.shape[1], is_backward=True)
    products = jnp.einsum("btnv,btnv->bnt", out, out_grad) - lse_grad
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    above = _scores(q, k, seen, scale) - jnp.where(lse == -jnp.inf, 0, lse)[..., None]
    weights = jnp.where(seen[:, None], jnp.exp(above), 0)
    weights_grad = jnp.einsum("btnv,bsnv->bnts", out_grad, v)
    scores_grad = scale * weights * (weights_grad - products[..., None])
    dq = jnp.einsum("bnts,bsnh->btnh", scores_grad, k)
    dk = jnp.einsum("bnts,btnh->bsnh", scores_grad, q)
    dv = jnp.einsum("bnts,btnv->bsnv", weights, out_grad)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(axis=3) for x in (dk, dv))
    grads = (x.astype(y.dtype) for x, y in zip((dq, dk, dv), operands, strict=False))
    return *grads, products


def _scores(q: Any, k: Any, seen: jax.Array, scale: float) -> jax.Array:
    return jnp.where(seen[:, None], scale * jnp.einsum("btnh,bsnh->bnts", q, k), -1e30)


def _attention(q: Any, k: Any, v: Any, seen: jax.Array, scale: float) -> tuple[Any, Any]:
    dtype, (q, k, v) = q.dtype, (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = _scores(q, k, seen, scale)
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
