"""The arrays of AITER's custom calls: conversion from and to a call's, results, scratch memory.

In group mode AITER's arrays have no batch axis: [B, L, …] becomes [B · L, …], and lse [B, N, T]
becomes [N, B · T]. Batch rows are laid end to end, each as one sequence or several. rocm_backend
reads results in the order given here, and refuses any other shape (call_structs*.cc).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.kernels import Accumulator, Kernel
from attn_dispatch.aiter.sizes import keys_per_split
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.kernel_seed import kernel_seed
from attn_dispatch.semantics.packing import SequenceRanges, flat_starts
from attn_dispatch.semantics.real_rows import real_rows_by_position
from attn_dispatch.semantics.row_ids import ascending
from attn_dispatch.semantics.scaled_query import scaled_query
from attn_dispatch.semantics.wider_arrays import pad_last, round_up

KernelArrays = dict[str, jax.Array]


def inputs(
    spec: AttentionSpec,
    call: AiterCall,
    operands: Mapping[str, jax.Array],
    sequences: Sequences,
) -> KernelArrays:
    """The operands that both directions begin with, in rocm_backend/call_structs.cc's order."""
    arrays = {
        "q": to_rows(pad_last(scaled_query(spec, operands["query"]), call.head_dim), call),
        "k": to_rows(pad_last(operands["key"], call.head_dim), call),
        "v": to_rows(pad_last(operands["value"], call.head_dim_v), call),
    }
    if call.bias == "bias":
        arrays["bias"] = _whole_rows(spec, operands["bias"])
    if call.bias == "alibi":
        arrays["bias"] = slopes_of_rows(operands["alibi_slopes"], call.batch)
    if call.dropout_rate > 0:
        arrays["rng_state"] = rng_state(spec, operands)
    arrays |= dict(
        zip(("seqstart_q", "seqstart_k", "seqlen_q", "seqlen_k"), sequences.operands, strict=False)
    )
    return arrays


def slopes_of_rows(slopes: jax.Array, batch: int) -> jax.Array:
    """Slopes [1|B, N] as float32 [1|batch, N], repeated for each sequence of a batch row."""
    slopes = slopes.astype(jnp.float32)
    return slopes if slopes.shape[0] == 1 else jnp.repeat(slopes, batch // slopes.shape[0], axis=0)


def _whole_rows(spec: AttentionSpec, bias: jax.Array) -> jax.Array:
    """The bias as [1|B, 1|N, T, S]: AITER broadcasts it over batch and heads only."""
    return jnp.broadcast_to(bias, (*bias.shape[:2], spec.seq_len_q, spec.seq_len_kv))


def rng_state(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array:
    """{seed, offset}, two u64 as u32 words."""
    return jnp.append(kernel_seed(spec, operands), jnp.zeros(2, jnp.uint32))


def to_rows(x: jax.Array, call: AiterCall) -> jax.Array:
    """x [B, L, ...] as AITER takes it: unchanged, or in group mode [B · L, ...]."""
    return x.reshape(-1, *x.shape[2:]) if call.is_group else x


def from_rows(x: jax.Array, batch: int) -> jax.Array:
    """x [B, L, heads, D] or [B · L, heads, D] as [B, L, heads, D]."""
    return x if x.ndim == 4 else x.reshape(batch, -1, *x.shape[1:])


def lse_to_rows(lse: jax.Array, call: AiterCall) -> jax.Array:
    """lse [B, N, T] as AITER takes it: unchanged, or in group mode [N, B · T]."""
    return jnp.swapaxes(lse, 0, 1).reshape(call.num_heads, -1) if call.is_group else lse


def lse_from_rows(lse: jax.Array, spec: AttentionSpec) -> jax.Array:
    if lse.ndim == 3:
        return lse
    return jnp.swapaxes(lse.reshape(spec.num_heads, spec.batch, spec.seq_len_q), 0, 1)


def where_real(real: jax.Array | None, x: jax.Array, value: float) -> jax.Array:
    return x if real is None else jnp.where(real[:, :, None, None], x, value)


def rounded_dq(dq_acc: jax.Array, dtype: str) -> jax.Array:
    """The gradient of query from its float32 sums, whose heads come before their rows."""
    return jnp.swapaxes(dq_acc, -3, -2).astype(dtype)


def sum_groups(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """Gradients [B, S, N, D], one per query head, summed to [B, S, K, D]."""
    if spec.num_heads == spec.num_kv_heads:
        return x
    by_group = x.reshape(*x.shape[:2], spec.num_kv_heads, -1, x.shape[3])
    return by_group.astype(jnp.float32).sum(axis=3).astype(x.dtype)


def sum_to_bias(spec: AttentionSpec, dbias: jax.Array) -> jax.Array:
    """The gradient [B, T, N, S] of every score, summed to the shape of the bias."""
    shape = spec.shape("bias")
    scores = jnp.swapaxes(dbias, 1, 2).astype(jnp.float32)
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    return scores.sum(axis=axes, keepdims=True).astype(dbias.dtype)


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


@dataclass(frozen=True)
class Sequences:
    """The further operands of a call in group mode, and the rows that XLA must fix.

    Kernels neither read nor write rows of no sequence, and some compute padding rows wrongly: CK
    gives NaN dK and dV for a sequence without queries
    (github.com/ROCm/rocm-libraries/pull/5790), and ASM gives NaN output for one without keys
    (github.com/ROCm/aiter/issues/1442).
    """

    operands: tuple[jax.Array, ...]
    """seqstart_q, seqstart_k and, with gaps, lengths of queries and keys; empty outside group mode.

    Lengths are seqlen_q and seqlen_k, or their prefix sums, cu_seqlen_q and cu_seqlen_k.
    """
    real_queries: jax.Array | None
    """bool [1|B, T]: the query attends to some key; None if all do."""
    real_keys: jax.Array | None
    """bool [1|B, S]: the key belongs to a sequence with queries; None if all do."""

    @staticmethod
    def of(
        spec: AttentionSpec,
        call: AiterCall,
        operands: Mapping[str, jax.Array],
        *,
        as_prefix_sums: bool = False,
    ) -> Sequences:
        """The sequences of any call: with lengths, segment ids, cu_seqlens or none of them."""
        queries, keys = real_rows_by_position(spec, operands)
        if not call.is_group:
            return Sequences((), queries, None)
        ranges = SequenceRanges.of(spec, operands)
        starts = _seqstarts(spec, call, operands, ranges)
        if as_prefix_sums:
            starts = (*starts[:2], *map(_prefix_sums, starts[2:]))
        return Sequences(starts, queries, keys)


def _prefix_sums(lengths: jax.Array) -> jax.Array:
    """[n] lengths as [n + 1] sums of those before each, and of all."""
    return jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0))


def _seqstarts(
    spec: AttentionSpec,
    call: AiterCall,
    operands: Mapping[str, jax.Array],
    ranges: SequenceRanges,
) -> tuple[jax.Array, ...]:
    """Where the sequences start and, with gaps, their lengths."""
    if not call.has_gaps:
        cu_q = ascending(operands["cu_seqlens_q"], spec.seq_len_q)
        cu_k = ascending(operands["cu_seqlens_kv"], spec.seq_len_kv)
        return cu_q[0], cu_k[0]
    return (
        flat_starts(ranges.starts_q, spec.seq_len_q),
        flat_starts(ranges.starts_kv, spec.seq_len_kv),
        ranges.lengths_q.reshape(-1),
        ranges.lengths_kv.reshape(-1),
    )
