"""FlashAttention-4's compiled kernels in float64 NumPy: the contract of fa4/interval_calls.py.

Tiles that no list names are not computed, and in those listed as full no pair is masked, so that a
wrong list gives a wrong result. In a listed tile, 0 · NaN is NaN, as in the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import attention_in_numpy as attention
from tests.support import scalar_code_in_numpy as in_numpy

Arrays = tuple[Any, ...]


@dataclass(frozen=True)
class Code:
    """A change of scores (programs/scalar_code.py)."""

    forward: str = "return x"
    backward: str = ""

    def changed(self, scores: np.ndarray, at: Arrays, arrays: Arrays) -> np.ndarray:
        """Scores [N, T, S] of the pairs `at`: b, n, t and s."""
        found = in_numpy.forward(self.forward, (scores, *at), arrays)
        return np.broadcast_to(found, scores.shape)

    def gradient(
        self, grad: np.ndarray, scores: np.ndarray, at: Arrays, arrays: Arrays
    ) -> np.ndarray:
        return in_numpy.backward(self.backward, (grad, scores, *at), arrays)


def _indices(n: np.ndarray, b: int, t: np.ndarray, s: np.ndarray) -> Arrays:
    places = (n[:, None, None], t[None, :, None], s[None, None, :])
    return np.full((1, 1, 1), b, np.int32), *(x.astype(np.int32) for x in places)


def forward(
    tile: tuple[int, int],
    q: Any,
    k: Any,
    v: Any,
    data: Any,
    lists: Any,
    scale: float,
    sinks: Any = None,
    code: Code = Code(),
    arrays: Arrays = (),
):
    """out [B, T, N, V] and lse [B, N, T], in a callback, for tiles of (queries, keys)."""
    batch, queries, heads, _ = q.shape
    out = jax.ShapeDtypeStruct((batch, queries, heads, v.shape[3]), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    run = partial(_forward, tile, scale=scale, code=code)
    further = () if sinks is None else (sinks,)
    return _in_callback(run, (out, lse), (q, k, v), (data, *lists), arrays, further)


def backward(
    tile: tuple[int, int],
    operands: Any,
    data: Any,
    lists: Any,
    scale: float,
    code: Code = Code(),
    arrays: Arrays = (),
):
    """The gradients of q, k and v from (q, k, v, out, lse, out_grad, lse_grad), and the sums of
    out · out_grad - lse_grad [B, N, T], in a callback.

    Lists are those of tiles of keys; `tile` is (queries, keys).
    """
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*operands[:3], operands[4]))
    run = partial(_backward, tile, scale=scale, code=code)
    return _in_callback(run, types, tuple(operands), (data, *lists), arrays)


def _in_callback(function: Callable[..., Arrays], types: Arrays, *groups: Arrays) -> Any:
    def run(*groups: Arrays) -> Arrays:
        return function(*(tuple(map(np.asarray, group)) for group in groups))

    return jax.pure_callback(run, types, *groups)


def _forward(
    tile: tuple[int, int],
    qkv: Arrays,
    mask: Arrays,
    arrays: Arrays,
    sinks: Arrays,
    *,
    scale: float,
    code: Code,
) -> Arrays:
    query, key, value = (np.asarray(x, np.float64) for x in qkv)
    key, value = (attention.repeated(x, query.shape[2]) for x in (key, value))
    out = np.zeros((*query.shape[:3], value.shape[3]))
    lse = np.full((query.shape[0], query.shape[2], query.shape[1]), -np.inf)
    n = np.arange(query.shape[2])
    for b, heads, (data, *lists) in _parts(mask, query.shape):
        q, k, v = (x[b, :, heads] for x in (query, key, value))
        for t, listed in _lines(lists, tile[0], len(q)):
            scores = np.full((q.shape[1], len(t), len(k)), -np.inf)
            reached = np.zeros(len(k), bool)
            for s, is_full in _tiles(listed, tile[1], len(k)):
                found = scale * attention.across(q[t], k[s])
                found = code.changed(found, _indices(n[heads], b, t, s), arrays)
                scores[:, :, s] = found if is_full else _masked(found, data, t, s)
                reached[s] = True
            weights, lse[b, heads][:, t] = attention.softmax(scores)
            out[b, :, heads][t] = attention.applied(weights[..., reached], v[reached])
    for one in sinks:
        added = _added(lse, np.asarray(one, np.float64)[..., None])
        out *= np.exp(-added).swapaxes(1, 2)[..., None]
        lse += added
    return out.astype(qkv[0].dtype), lse.astype(np.float32)


def _added(lse: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """What sinks [1|B, N, 1] add to lse: nothing in rows that see no key."""
    sees_none = lse == -np.inf
    return np.where(sees_none, 0, np.logaddexp(0, sinks - np.where(sees_none, 0, lse)))


def _backward(
    tile: tuple[int, int],
    operands: Arrays,
    mask: Arrays,
    arrays: Arrays,
    *,
    scale: float,
    code: Code,
) -> Arrays:
    query, key, value, out, all_lse, all_grads, lse_grad = (
        np.asarray(x, np.float64) for x in operands
    )
    kv_heads = key.shape[2]
    key, value = (attention.repeated(x, query.shape[2]) for x in (key, value))
    all_dq, all_dk, all_dv = (np.zeros(x.shape) for x in (query, key, value))
    all_products = np.einsum("btnh,btnh->bnt", out, all_grads) - lse_grad
    n = np.arange(query.shape[2])
    for b, heads, (data, *lists) in _parts(mask, query.shape):
        q, k, v, out_grad = (x[b, :, heads] for x in (query, key, value, all_grads))
        lse, products = (x[b, heads] for x in (all_lse, all_products))
        dq, dk, dv = (x[b, :, heads] for x in (all_dq, all_dk, all_dv))  # views
        for s, listed in _lines(lists, tile[1], len(k)):
            for t, is_full in _tiles(listed, tile[0], len(q)):
                plain = scale * attention.across(q[t], k[s])
                at = _indices(n[heads], b, t, s)
                scores = code.changed(plain, at, arrays)
                scores = scores if is_full else _masked(scores, data, t, s)
                row_lse = np.where(lse[:, t] == -np.inf, 0, lse[:, t])
                p = np.exp(scores - row_lse[..., None])
                ds = p * (attention.across(out_grad[t], v[s]) - products[:, t][..., None])
                ds = scale * code.gradient(ds, plain, at, arrays)
                parts = attention.gradients(q[t], k[s], p, ds, out_grad[t])
                for sums, rows, part in zip((dq, dk, dv), (t, s, s), parts, strict=True):
                    sums[rows] += part
    dk, dv = (attention.summed(x, kv_heads) for x in (all_dk, all_dv))
    results = zip((all_dq, dk, dv, all_products), (*operands[:3], operands[4]), strict=True)
    return tuple(x.astype(y.dtype) for x, y in results)


def _parts(mask: Arrays, shape: tuple[int, ...]) -> Iterator[tuple[int, slice, list[Any]]]:
    """Each batch row and head, or all heads if they share their mask, with its rows [T, 4] or bits
    [T, W] and its lists. `shape` is [B, T, N, H]."""
    data, *lists = mask
    arrays = (data if data.dtype == np.uint32 else data[:, None], *lists)
    differs = max(x.shape[1] for x in arrays) > 1
    for b in range(shape[0]):
        for n in range(shape[2] if differs else 1):
            part = [x[b if len(x) > 1 else 0, n if x.shape[1] > 1 else 0] for x in arrays]
            yield b, slice(n, n + 1) if differs else slice(None), part


def _lines(
    lists: list[Any], size: int, length: int
) -> Iterator[tuple[np.ndarray, list[tuple[int, bool]]]]:
    """The places of each line of tiles along one axis, and the tiles listed for it."""
    partial_counts, partial_indices, full_counts, full_indices = lists
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


def _masked(scores: np.ndarray, data: Any, t: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Scores [N, T, S] of the rows t and keys s, with -inf where the mask, rows [T, 4] or bits
    [T, W], hides the pair."""
    if data.dtype == np.uint32:
        seen = data[t][:, s // 32] >> (s % 32).astype(np.uint32) & 1 > 0
    else:
        a0, n0, a1, n1 = (x[:, None] for x in data[t].T)
        seen = ((s >= a0) & (s < a0 + n0)) | ((s >= a1) & (s < a1 + n1))
    return np.where(seen, scores, -np.inf)
