"""FlashAttention's kernels in float64 NumPy: the contract of flash/kernels.py, written out.

Results that a kernel leaves unwritten are NaN here. Kernels multiply whole tiles, so that NaN in
the rows after a packed sequence reaches the results of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.flash.call import FlashCall, offsets_count
from attn_dispatch.flash.generations import FA2
from tests.support import attention_in_numpy as attention

ArrayTuple = tuple[Any, ...]


def forward(call: FlashCall, qkv: ArrayTuple, offsets: ArrayTuple, scale: float) -> ArrayTuple:
    """out and lse, computed in a callback, so that the operations around it can be compiled."""
    out = jax.ShapeDtypeStruct((*qkv[0].shape[:-1], call.head_dim), qkv[0].dtype)
    lse = jax.ShapeDtypeStruct(_lse_shape(call), jnp.float32)
    return _in_callback(partial(_forward, call, scale=scale), (out, lse), qkv, offsets)


def _in_callback(function: Callable[..., ArrayTuple], types: ArrayTuple, *groups: Any) -> Any:
    """Run a function of groups of NumPy arrays in a callback.

    An operation of JAX in a callback would wait forever for XLA's only thread on one core.
    """

    def run(*groups: ArrayTuple) -> ArrayTuple:
        return function(*(tuple(map(np.asarray, group)) for group in groups))

    return jax.pure_callback(run, types, *groups)


def _forward(call: FlashCall, qkv: ArrayTuple, offsets: ArrayTuple, scale: float) -> ArrayTuple:
    q, k, v = (np.asarray(x, np.float64) for x in qkv)
    _check_head_dims(call, (q, k), (v,))
    out = np.full((*q.shape[:-1], call.head_dim), np.nan)
    lse = np.full(_lse_shape(call), np.nan)
    for rows, keys, into in _sequences(call, offsets):
        weights, row_lse = attention.softmax(_scores(call, q[rows], k[keys], scale))
        o = attention.applied(weights, v[keys])
        written = slice(0, call.longest_q) if call.is_packed else slice(None)
        out[rows][written] = (o + _rest_of_tile(call, (v,), keys))[written]
        lse[into][:, written] = row_lse[:, written]
    return out.astype(qkv[0].dtype), lse.astype(np.float32)


def backward(
    call: FlashCall, operands: ArrayTuple, offsets: ArrayTuple, scale: float
) -> ArrayTuple:
    """The gradients of query, key and value, in a callback."""
    dtype = operands[1].dtype
    types = tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in operands[1:4])
    return _in_callback(partial(_backward, call, scale=scale), types, operands, offsets)


def _backward(
    call: FlashCall, operands: ArrayTuple, offsets: ArrayTuple, scale: float
) -> ArrayTuple:
    out_grad, q, k, v, out, lse = (np.asarray(x, np.float64) for x in operands)
    _check_head_dims(call, (q, k), (v, out, out_grad))
    found = [np.full(x.shape, np.nan) for x in (q, k, v)]
    for rows, keys, into in _sequences(call, offsets):
        scores = _scores(call, q[rows], k[keys], scale)
        p = np.exp(scores - lse[into][..., None])
        wrong = _rest_of_tile(call, (k, v), keys) + _rest_of_tile(call, (q, out_grad), rows)
        delta = (out[rows] * out_grad[rows]).sum(-1).T
        ds = p * (attention.across(out_grad[rows], v[keys]) - delta[..., None])
        parts = attention.gradients(q[rows], k[keys], p, scale * ds, out_grad[rows])
        in_time = [slice(0, x) for x in (call.longest_q, call.longest_kv, call.longest_kv)]
        places = (rows, keys, keys)
        for array, place, part, written in zip(found, places, parts, in_time, strict=True):
            written = written if call.is_packed else slice(None)
            array[place][written] = (part + wrong)[written]
    return tuple(x.astype(operands[1].dtype) for x in found)


def _check_head_dims(call: FlashCall, keys: ArrayTuple, values: ArrayTuple) -> None:
    assert {x.shape[-1] for x in keys} == {call.head_dim}
    assert {x.shape[-1] for x in values} == {call.head_dim}


def _lse_shape(call: FlashCall) -> tuple[int, ...]:
    shape = (call.num_heads, call.rows_q)
    return shape if call.is_packed else (call.batch, *shape)


def _sequences(call: FlashCall, offsets: ArrayTuple) -> Iterator[tuple[Any, Any, Any]]:
    """The index of each sequence's queries, of its keys, and of its lse."""
    if not call.is_packed:
        for b in range(call.batch):
            yield b, b, b
        return
    starts_q, starts_kv = (np.asarray(x) for x in offsets)
    assert len(starts_q) == len(starts_kv) == offsets_count(call)
    for x, rows in ((starts_q, call.rows_q), (starts_kv, call.rows_kv)):
        covers_all = x[0] == 0 and x[-1] == rows
        assert covers_all or (call.is_end_to_end and x[0] >= 0 and x[-1] <= rows)
        assert (np.diff(x) >= 0).all()
    # Gaps compute nothing: their queries have no keys.
    both = (np.diff(starts_q) > 0) & (np.diff(starts_kv) > 0)
    assert both.sum() <= call.sequences
    if call.generation is FA2:  # its buffers have this many rows for each range, gaps included
        assert np.diff(starts_q).max() <= call.longest_q
        assert np.diff(starts_kv).max() <= call.longest_kv
    for i in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_kv[i : i + 2])
        yield rows, keys, (slice(None), rows)


def _rest_of_tile(call: FlashCall, arrays: ArrayTuple, place: Any) -> float:
    """NaN if the rows after a packed sequence, within its last tile, hold NaN or inf; else 0."""
    if not call.is_packed or place.start == place.stop:
        return 0.0
    after = slice(place.stop, place.stop + call.generation.tile - 1)
    return 0.0 * sum(x[after].sum() for x in arrays)


def _scores(call: FlashCall, q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    assert scale > 0
    scores = scale * attention.across(q, k)
    t, s = scores.shape[1:]
    distance = np.arange(s) - (
        np.arange(t)[:, None] + s - t
    )  # of a key from the diagonal, to the right
    left, right = call.window_left, 0 if call.is_causal else call.window_right
    is_visible = np.ones((t, s), bool)
    if left >= 0:
        is_visible &= distance >= -left
    if right >= 0:
        is_visible &= distance <= right
    return np.where(is_visible, scores, -np.inf)


def run_fa2(call: FlashCall, results: Any, operands: ArrayTuple, scale: float) -> ArrayTuple:
    """A custom call of FlashAttention-2, with lse by sequence and dk, dv for each query head."""
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)
    return _in_callback(partial(_run_fa2, call, types, scale=scale), types, operands)


def _run_fa2(call: FlashCall, results: Any, operands: ArrayTuple, scale: float) -> ArrayTuple:
    count = 6 if call.backward else 3
    arrays, offsets = list(operands[:count]), operands[count:]
    if not call.backward:
        out, lse = _forward(call, tuple(arrays), offsets, scale)
        found = (out, _by_sequence(call, lse, offsets) if call.is_packed else lse)
    else:
        if call.is_packed:
            arrays[5] = _by_row(call, arrays[5], offsets)
        group = call.num_heads // call.num_kv_heads
        arrays[2], arrays[3] = (np.repeat(x, group, axis=-2) for x in arrays[2:4])
        wide = replace(call, num_kv_heads=call.num_heads)
        found = _backward(wide, tuple(arrays), offsets, scale)
    scratch = [np.full(x.shape, np.nan, x.dtype) for x in results[len(found) :]]
    for x, y in zip(found, results, strict=False):
        assert x.shape == y.shape
    return (*found, *scratch)


def _by_sequence(call: FlashCall, lse: Any, offsets: ArrayTuple) -> np.ndarray:
    """lse [N, rows] as [sequences, N, longest], NaN past the end of a sequence."""
    starts = np.asarray(offsets[0])
    found = np.full((len(starts) - 1, call.num_heads, call.longest_q), np.nan, np.float32)
    for i, (start, end) in enumerate(pairwise(starts)):
        found[i, :, : end - start] = lse[:, start:end]
    return found


def _by_row(call: FlashCall, lse: Any, offsets: ArrayTuple) -> np.ndarray:
    found = np.full((call.num_heads, call.rows_q), np.nan, np.float32)
    for i, (start, end) in enumerate(pairwise(np.asarray(offsets[0]))):
        found[:, start:end] = lse[i, :, : end - start]
    return found
