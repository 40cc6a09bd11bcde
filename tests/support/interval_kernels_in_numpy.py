"""FlashAttention-4's compiled kernels in float64 NumPy: the contract of fa4/interval_calls.py.

Tiles that no list names are not computed, and in those listed as full no pair is masked, so that a
wrong list gives a wrong result. In a listed tile, 0 · NaN is NaN, as in the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = tuple[Any, ...]


def forward(tile: tuple[int, int], q: Any, k: Any, v: Any, rows: Any, lists: Any, scale: float):
    """out [B, T, N, V] and lse [B, N, T], in a callback, for tiles of (queries, keys)."""
    batch, queries, heads, _ = q.shape
    out = jax.ShapeDtypeStruct((batch, queries, heads, v.shape[3]), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    run = partial(_forward, tile, scale=scale)
    return _in_callback(run, (out, lse), (q, k, v), (rows, *lists))


def backward(tile: tuple[int, int], operands: Any, rows: Any, lists: Any, scale: float):
    """The gradients of q, k and v from (q, k, v, out, lse, out_grad, lse_grad), in a callback.

    Lists are those of tiles of keys; `tile` is (queries, keys).
    """
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:3])
    run = partial(_backward, tile, scale=scale)
    return _in_callback(run, types, tuple(operands), (rows, *lists))


def _in_callback(function: Callable[..., Arrays], types: Arrays, *groups: Arrays) -> Any:
    def run(*groups: Arrays) -> Arrays:
        return function(*(tuple(map(np.asarray, group)) for group in groups))

    return jax.pure_callback(run, types, *groups)


def _forward(tile: tuple[int, int], qkv: Arrays, mask: Arrays, scale: float) -> Arrays:
    q, k, v = (np.asarray(x, np.float64) for x in qkv)
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    rows, *lists = mask
    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for b in range(len(q)):
        for t, listed in _lines(lists, b, tile[0], q.shape[1]):
            scores = np.full((q.shape[2], len(t), k.shape[1]), -np.inf)
            reached = np.zeros(k.shape[1], bool)
            for s, is_full in _tiles(listed, tile[1], k.shape[1]):
                found = scale * np.einsum("tnh,snh->nts", q[b, t], k[b, s])
                scores[:, :, s] = found if is_full else _masked(found, rows, b, t, s)
                reached[s] = True
            top = scores.max(-1, initial=-np.inf)
            weights = np.exp(scores - np.where(top == -np.inf, 0, top)[..., None])
            total = weights.sum(-1)
            with np.errstate(divide="ignore"):
                lse[b][:, t] = np.log(total) + np.where(top == -np.inf, 0, top)
            weights /= np.where(total == 0, 1, total)[..., None]
            out[b, t] = np.einsum("nts,snh->tnh", weights[..., reached], v[b, reached])
    return out.astype(qkv[0].dtype), lse.astype(np.float32)


def _backward(tile: tuple[int, int], operands: Arrays, mask: Arrays, scale: float) -> Arrays:
    q, k, v, out, lse, out_grad, lse_grad = (np.asarray(x, np.float64) for x in operands)
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    rows, *lists = mask
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    products = np.einsum("btnh,btnh->bnt", out, out_grad) - lse_grad
    for b in range(len(q)):
        for s, listed in _lines(lists, b, tile[1], k.shape[1]):
            for t, is_full in _tiles(listed, tile[0], q.shape[1]):
                scores = scale * np.einsum("tnh,snh->nts", q[b, t], k[b, s])
                scores = scores if is_full else _masked(scores, rows, b, t, s)
                row_lse = np.where(lse[b][:, t] == -np.inf, 0, lse[b][:, t])
                p = np.exp(scores - row_lse[..., None])
                dp = np.einsum("tnh,snh->nts", out_grad[b, t], v[b, s])
                ds = p * (dp - products[b][:, t][..., None])
                dv[b, s] += np.einsum("nts,tnh->snh", p, out_grad[b, t])
                dk[b, s] += scale * np.einsum("nts,tnh->snh", ds, q[b, t])
                dq[b, t] += scale * np.einsum("nts,snh->tnh", ds, k[b, s])
    dk, dv = (_summed(x, group) for x in (dk, dv))
    return tuple(x.astype(y.dtype) for x, y in zip((dq, dk, dv), operands[:3], strict=True))


def _summed(x: np.ndarray, group: int) -> np.ndarray:
    """The sums over the heads of each group, [B, S, K, D]."""
    batch, keys, heads, width = x.shape
    return x.reshape(batch, keys, heads // group, group, width).sum(axis=3)


def _lines(
    lists: list[Any], b: int, size: int, length: int
) -> Iterator[tuple[np.ndarray, list[tuple[int, bool]]]]:
    """The places of each line of tiles along one axis, and the tiles listed for it."""
    partial_counts, partial_indices, full_counts, full_indices = (
        x[b if len(x) > 1 else 0, 0] for x in lists
    )
    for line in range(-(-length // size)):
        listed = [(int(x), False) for x in partial_indices[line, : partial_counts[line]]]
        listed += [(int(x), True) for x in full_indices[line, : full_counts[line]]]
        assert len({x for x, _ in listed}) == len(listed), "a tile is listed twice"
        yield np.arange(size * line, min(size * (line + 1), length)), listed


def _tiles(
    listed: list[tuple[int, bool]], size: int, length: int
) -> Iterator[tuple[np.ndarray, bool]]:
    for index, is_full in listed:
        assert 0 <= index < -(-length // size), "a tile outside the array is listed"
        yield np.arange(size * index, min(size * (index + 1), length)), is_full


def _masked(scores: np.ndarray, rows: Any, b: int, t: np.ndarray, s: np.ndarray) -> np.ndarray:
    a0, n0, a1, n1 = (x[:, None] for x in rows[b if len(rows) > 1 else 0, t].T)
    seen = ((s >= a0) & (s < a0 + n0)) | ((s >= a1) & (s < a1 + n1))
    return np.where(seen, scores, -np.inf)
