"""The arrays that express a call's options to cuDNN: lengths and offsets, the bias, and what nodes
read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from attn_dispatch.call.operands import Operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn.call import CudnnCall, node_array_extents
from attn_dispatch.cudnn.score_nodes import nodes_of
from attn_dispatch.programs.kernel import KernelProgram
from attn_dispatch.programs.nodes import HeadSlopes, NodeArray, RowKeys, XlaArray
from attn_dispatch.semantics.mods import arrays_of, xla_array
from attn_dispatch.semantics.packing import SequenceRanges, flat_starts
from attn_dispatch.semantics.pair_indices import PairIndices
from attn_dispatch.semantics.real_rows import leading_padding_rows
from attn_dispatch.semantics.wider_arrays import pad_last, round_up

BIAS_ROW_MULTIPLE = 8


def lengths_and_offsets(
    spec: AttentionSpec, call: CudnnCall, operands: Operands
) -> list[jax.Array]:
    ranges = SequenceRanges.of(spec, operands)
    lengths_q = ranges.lengths_q - leading_padding_rows(spec)
    if not call.is_packed:
        return [lengths_q[:, 0], ranges.lengths_kv[:, 0]]
    first_q = flat_starts(ranges.starts_q, spec.seq_len_q - leading_padding_rows(spec))
    first_kv = flat_starts(ranges.starts_kv, spec.seq_len_kv)
    in_queries = _row_offsets(first_q, call.num_heads, call.head_rows_q)
    in_keys = _row_offsets(first_kv, call.num_kv_heads, call.head_rows_kv)
    return [
        lengths_q.reshape(-1),
        ranges.lengths_kv.reshape(-1),
        in_queries * call.head_dim,
        in_keys * call.head_dim,
        in_keys * call.head_dim_v,
        in_queries * call.head_dim_v,
        *([first_q * call.num_heads] if call.has_statistics else []),
    ]


def _row_offsets(first: jax.Array, heads: int, head_rows: int) -> jax.Array:
    """Where sequences begin in an array, in units of one head of a row. With heads first, it is
    where they begin in the first head."""
    if not head_rows:
        return first * heads
    return first // head_rows * (head_rows * heads) + first % head_rows


def score_bias(spec: AttentionSpec, call: CudnnCall, operands: Operands) -> jax.Array:
    """The bias, -inf where masked, with rows padded to a multiple of 16 bytes."""

    def extended(name: str) -> jax.Array:
        x = operands[name]
        x = x[:, :, leading_padding_rows(spec) :] if x.shape[2] > 1 else x
        extents = (call.bias_batch, call.bias_heads, call.bias_rows, spec.seq_len_kv)
        return jnp.broadcast_to(x, extents)

    bias = jnp.zeros((), call.bias_dtype)
    if spec.has("bias"):
        bias = extended("bias").astype(call.bias_dtype)
        if spec.has_runtime_lengths:
            bias = _without_padding(spec, call, operands, bias)
    if spec.has("mask"):
        bias = jnp.where(extended("mask"), bias, -jnp.inf)
    return pad_last(bias, round_up(spec.seq_len_kv, BIAS_ROW_MULTIPLE))


def _without_padding(
    spec: AttentionSpec, call: CudnnCall, operands: Operands, score_bias: jax.Array
) -> jax.Array:
    """The bias, with 0 where all batch rows that share it have padding.

    cuDNN 9.28 adds the bias to masked scores, and NaN - inf is NaN (H200).
    """
    ranges = SequenceRanges.of(spec, operands)
    queries, keys = ranges.real_queries, ranges.real_keys
    if call.bias_batch == 1:
        queries, keys = (x.any(axis=0, keepdims=True) for x in (queries, keys))
    is_read = keys[:, None, None, :]
    if call.bias_rows > 1:
        is_read &= queries[:, None, :, None]
    return jnp.where(is_read, score_bias, 0)


def node_arrays(spec: AttentionSpec, call: CudnnCall, operands: Operands) -> list[jax.Array]:
    """The arrays that nodes read, computed by XLA beforehand."""
    nodes = nodes_of(spec, packed=call.is_packed)
    assert isinstance(nodes, KernelProgram)
    return [
        jnp.broadcast_to(
            _node_array(spec, call, operands, array), node_array_extents(spec, call, array)
        )
        for array in nodes.arrays
    ]


def _node_array(
    spec: AttentionSpec, call: CudnnCall, operands: Operands, array: NodeArray
) -> jax.Array:
    if isinstance(array, HeadSlopes):
        return operands["alibi_slopes"].astype(jnp.float32)[:, :, None, None]
    if isinstance(array, XlaArray):
        indices = PairIndices.of_sequences(
            spec,
            operands,
            sequences=call.batch // spec.batch,
            queries=(leading_padding_rows(spec), call.seq_len_q),
            keys=call.seq_len_kv,
        )
        read = arrays_of(array.mod, spec.meaning.mods[array.mod], operands)
        return xla_array(array, indices, read).astype(array.dtype)
    t = leading_padding_rows(spec) + lax.broadcasted_iota(jnp.int32, (1, call.seq_len_q), 1)
    x = _row_keys(spec, operands, array, t)
    if array.border is None:
        return x
    return _NARROWER[array.which](x, _node_array(spec, call, operands, array.border))


_NARROWER = {"first": jnp.maximum, "end": jnp.minimum}


def _row_keys(spec: AttentionSpec, operands: Operands, array: RowKeys, t: jax.Array) -> jax.Array:
    """int32 [B · M, 1, T, 1]: the bounds of the queries at positions t [1, T] of each sequence."""
    ranges = SequenceRanges.of(spec, operands)
    queries, keys = (x.reshape(-1, 1) for x in (ranges.lengths_q, ranges.lengths_kv))
    is_bottom_right = spec.meaning.causal_alignment == "bottom_right"
    diagonal = t + (keys - queries if is_bottom_right else 0)
    left, right = spec.band
    if array.which == "first":
        found = jnp.broadcast_to(diagonal - (0 if left is None else left), diagonal.shape)
    else:
        found = keys if right is None else jnp.minimum(keys, diagonal + right + 1)
        found = jnp.where(t < queries, found, 0)
    shape = (queries.shape[0], t.shape[1])
    return jnp.broadcast_to(found, shape).astype(jnp.int32)[:, None, :, None]
