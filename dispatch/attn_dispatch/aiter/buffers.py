"""The results of AITER's custom calls and their sizes, including scratch memory.

rocm_backend reads them in this order and refuses any other shape (call_structs*.cc).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.kernels import Accumulator, Kernel
from attn_dispatch.aiter.sizes import keys_per_split
from attn_dispatch.semantics.wider_arrays import round_up

Buffers = dict[str, jax.ShapeDtypeStruct]


def forward_results(call: AiterCall) -> Buffers:
    """out, and lse if it is wanted."""
    results = {"out": _rows(call, call.seq_len_q, call.num_heads, call.head_dim_v)}
    if call.needs_lse:
        results["lse"] = _per_row(call)
    return results


def split_results(call: AiterCall, num_splits: int) -> Buffers:
    """out, lse if it is wanted, and the partial results of each split; heads come first."""
    rows = (call.batch, call.num_heads, call.seq_len_q)
    parts = (call.batch, call.num_heads, num_splits, call.seq_len_q)
    results = {"out": jax.ShapeDtypeStruct((*rows, call.head_dim_v), call.dtype)}
    if call.needs_lse:
        results["lse"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    results["lse_acc"] = jax.ShapeDtypeStruct(parts, jnp.float32)
    results["out_acc"] = jax.ShapeDtypeStruct((*parts, call.head_dim_v), jnp.float32)
    return results


def backward_results(call: AiterCall, kernel: Kernel) -> Buffers:
    """dq, dk and dv with all query heads, dbias if it is wanted, and scratch memory."""
    results = {
        "dq": _rows(call, call.seq_len_q, call.num_heads, call.head_dim),
        "dk": _rows(call, call.seq_len_kv, call.num_heads, call.head_dim),
        "dv": _rows(call, call.seq_len_kv, call.num_heads, call.head_dim_v),
    }
    if call.has_dbias:
        shape = (call.batch, call.seq_len_q, call.num_heads, call.seq_len_kv)
        results["dbias"] = jax.ShapeDtypeStruct(shape, call.dtype)
    results["softmax_d"] = _per_row(call)
    results["dq_acc"] = dq_acc(call, kernel.accumulator)
    return results


def workspace_bytes(call: AiterCall, kernel: Kernel) -> int:
    """Bytes of scratch memory: results beyond output, lse and gradients of the operands' sizes."""
    if call.is_split:
        results = split_results(call, kernel.num_splits)
        return num_bytes(results["lse_acc"]) + num_bytes(results["out_acc"])
    if not call.backward:
        return 0
    results = backward_results(call, kernel)
    scratch = num_bytes(results["softmax_d"]) + num_bytes(results["dq_acc"])
    if not kernel.rounds_dq:
        scratch += num_bytes(results["dq"])
    if "dbias" in results:
        scratch += num_bytes(results["dbias"])
    if call.num_heads != call.num_kv_heads:
        scratch += num_bytes(results["dk"]) + num_bytes(results["dv"])
    return scratch


def _rows(call: AiterCall, length: int, heads: int, dim: int) -> jax.ShapeDtypeStruct:
    leading = () if call.is_group else (call.batch,)
    return jax.ShapeDtypeStruct((*leading, length, heads, dim), call.dtype)


def _per_row(call: AiterCall) -> jax.ShapeDtypeStruct:
    leading = () if call.is_group else (call.batch,)
    return jax.ShapeDtypeStruct((*leading, call.num_heads, call.seq_len_q), jnp.float32)


def dq_acc(call: AiterCall, accumulator: Accumulator) -> jax.ShapeDtypeStruct:
    """The accumulator of dq, in the layout of aiter_api.h's AttnAiterAccumulator."""
    if accumulator == "atomic_32":
        return jax.ShapeDtypeStruct((*_per_row(call).shape, call.head_dim), jnp.float32)
    if accumulator == "atomic_16":
        rows = round_up(call.max_seq_len_q, 16)
        dim = 192 if call.head_dim == 192 else 128
        return jax.ShapeDtypeStruct((call.batch, call.num_heads, rows, dim), call.dtype)
    rows = _rows(call, call.seq_len_q, call.num_heads, call.head_dim)
    return jax.ShapeDtypeStruct((num_dq_acc(call), *rows.shape), jnp.float32)


def num_dq_acc(call: AiterCall) -> int:
    """The number of dq_acc that CK writes: one, or one per tile of keys if deterministic."""
    if not call.deterministic:
        return 1
    return -(-call.max_seq_len_kv // keys_per_split(call))


def num_bytes(x: jax.ShapeDtypeStruct) -> int:
    """The size of a buffer."""
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
