"""Arrays as cuDNN's custom calls take and return them, in the order of cuda_backend/buffers.h."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.operands import Operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn.call import CudnnCall, has_nodes
from attn_dispatch.cudnn.option_arrays import (
    BIAS_ROW_MULTIPLE,
    lengths_and_offsets,
    node_arrays,
    score_bias,
)
from attn_dispatch.semantics.invalid_values import invalid_queries, nan_where_invalid
from attn_dispatch.semantics.kernel_seed import kernel_seed
from attn_dispatch.semantics.lse_grad import with_lse_grad
from attn_dispatch.semantics.packing import SequenceRanges
from attn_dispatch.semantics.pages import flat_pages, flat_table
from attn_dispatch.semantics.real_rows import (
    NO_WEIGHT,
    RealRows,
    each_query_attends,
    leading_padding_rows,
)
from attn_dispatch.semantics.row_flags import INVALID, PADDING, REAL
from attn_dispatch.semantics.scaled_query import scaled_query
from attn_dispatch.semantics.sinks import sinks_grad
from attn_dispatch.semantics.sums import sum_like
from attn_dispatch.semantics.wider_arrays import pad_last, padded_bytes, prepend, round_up


def forward_operands(spec: AttentionSpec, call: CudnnCall, operands: Operands) -> list[jax.Array]:
    """Flags of rows, query, key, value, and the arrays of the call's options."""
    operands = _with_padding_cleared(spec, call, operands)
    return [
        *_row_flags(spec, call, operands),
        *_query_key_value(spec, call, operands),
        *_options(spec, call, operands),
    ]


def backward_operands(spec: AttentionSpec, call: CudnnCall, operands: Operands) -> list[jax.Array]:
    """Flags of rows, query, key, value, out, lse, out_grad, and the arrays of the options."""
    operands = _with_padding_cleared(spec, call, operands)
    out, out_grad = operands["out"], operands["out_grad"]
    if spec.has("lse_grad"):
        out, out_grad = with_lse_grad(out, out_grad, operands["lse"], operands["lse_grad"])
    lse = operands["lse"]
    if not each_query_attends(spec):
        lse = jnp.where(lse == -jnp.inf, NO_WEIGHT, lse)
    lse = lse[:, :, leading_padding_rows(spec) :]
    return [
        *_row_flags(spec, call, operands),
        *_query_key_value(spec, call, operands),
        _queries(spec, call, out, call.head_dim_v),
        _to_rows(jnp.swapaxes(lse, 1, 2)) if call.is_packed else lse,
        _queries(spec, call, out_grad, call.head_dim_v),
        *_options(spec, call, operands),
    ]


def forward_shapes(call: CudnnCall) -> dict[str, jax.ShapeDtypeStruct]:
    """The results of a forward call, by the names of buffers.h."""
    shapes = {"out": _rows(call, "query", call.head_dim_v)}
    statistics = [("lse", call.needs_lse), ("row_max", call.needs_max), ("row_sum", call.needs_max)]
    for name, wanted in statistics:
        if wanted:
            shapes[name] = _statistic(call)
    if call.needs_keep:
        extents = (call.batch, call.num_heads, call.seq_len_q, call.seq_len_kv)
        shapes["keep"] = jax.ShapeDtypeStruct(extents, jnp.float32)
    return shapes


def backward_shapes(call: CudnnCall) -> dict[str, jax.ShapeDtypeStruct]:
    """The results of a backward call, by the names of buffers.h."""
    shapes = {
        "dq": _rows(call, "query", call.head_dim),
        "dk": _rows(call, "key", call.head_dim),
        "dv": _rows(call, "key", call.head_dim_v),
    }
    if call.needs_dbias:
        extents = (call.bias_batch, call.bias_heads, call.seq_len_q, call.seq_len_kv)
        shapes["dbias"] = jax.ShapeDtypeStruct(extents, call.dtype)
    return shapes


def extra_bytes(spec: AttentionSpec, call: CudnnCall) -> int:
    """Bytes of the arrays that are made for the custom call: padded copies, the one array of bias
    and mask, its gradient before it is summed to the bias, and a dropout mask in float32."""
    shapes = backward_shapes(call) if call.backward else forward_shapes(call)
    made = {x: shapes[x] for x in ("keep", "dbias") if x in shapes}
    bias = (spec.shape("bias"), spec.dtype_of("bias")) if spec.has("bias") else None
    if bias is not None and "dbias" in made and bias == (made["dbias"].shape, call.dtype):
        del made["dbias"]
    if call.bias_dtype:
        columns = round_up(spec.seq_len_kv, BIAS_ROW_MULTIPLE)
        extents = (call.bias_batch, call.bias_heads, call.bias_rows, columns)
        is_own = bias == (extents, call.bias_dtype) and not spec.has("mask")
        if not is_own:
            made["bias"] = jax.ShapeDtypeStruct(extents, call.bias_dtype)
    sizes = (prod(x.shape) * x.dtype.itemsize for x in made.values())
    return padded_bytes(spec, call.head_dim, call.head_dim_v) + sum(sizes)


def forward_results(
    spec: AttentionSpec, call: CudnnCall, operands: Operands, results: Operands
) -> tuple[jax.Array, ...]:
    """The results that `spec.result_names` lists, from the results of the custom call."""
    real = RealRows.of(spec, operands).queries
    out = _from_memory(spec, results["out"], call.head_rows_q, leading_padding_rows(spec))
    rows_to_keep = None if spec.promises.ignores_padding_rows else real
    found = {"out": _cleared(call, rows_to_keep, out[..., : spec.head_dim_v])}
    statistics = {name: results[name] for name in ("lse", "row_max") if name in results}
    if call.needs_max:
        statistics["lse"] = results["row_max"] + jnp.log(results["row_sum"])
    for name, x in statistics.items():
        if call.is_packed:
            x = jnp.swapaxes(x.reshape(spec.batch, -1, spec.num_heads), 1, 2)
        x = prepend(x, leading_padding_rows(spec), axis=2, value=-np.inf)
        found[name] = x if real is None else jnp.where(real, x, -jnp.inf)
    if call.needs_keep:
        keep = _all_rows(spec, results["keep"], value=1)
        found["keep"] = keep > 0
    # The custom call may have put NaN into `out` already; a second time would cost another pass.
    left = {x: y for x, y in found.items() if not (x == "out" and _clears_all(call, real))}
    found |= nan_where_invalid(spec, operands, left)
    return tuple(found[name] for name in spec.result_names)


def backward_results(
    spec: AttentionSpec, call: CudnnCall, operands: Operands, results: Operands
) -> tuple[jax.Array, ...]:
    """The gradients wanted, from the results of the custom call."""
    padding, real = leading_padding_rows(spec), RealRows.of(spec, operands).queries
    query = _from_memory(spec, results["dq"], call.head_rows_q, padding)[..., : spec.head_dim]
    key, value = (_from_memory(spec, results[x], call.head_rows_kv) for x in ("dk", "dv"))
    found = {
        "query": scaled_query(spec, _cleared(call, real, query)),
        "key": key[..., : spec.head_dim],
        "value": value[..., : spec.head_dim_v],
    }
    if call.needs_dbias:
        dbias = _all_rows(spec, results["dbias"], value=0)
        found["bias"] = sum_like(dbias, spec.shape("bias")).astype(spec.dtype_of("bias"))
    if "sinks" in spec.wanted.gradients:
        # cuDNN's gradient of sinks was wrong under dropout and differed from call to call (H200,
        # 9.19), and versions before 9.26 have none for packed sequences.
        found["sinks"] = sinks_grad(spec, operands)
    return tuple(found[name] for name in spec.wanted.gradients)


def _row_flags(spec: AttentionSpec, call: CudnnCall, operands: Operands) -> list[jax.Array]:
    """Flags, uint8 [rows], of queries and in the backward pass of keys too; see clear_rows.h."""
    if not call.clears_rows:
        return []
    real = RealRows.of(spec, operands)
    assert real.queries is not None
    queries = jnp.broadcast_to(real.queries.any(axis=1), (spec.batch, spec.seq_len_q))
    flags = jnp.where(queries, REAL, PADDING)
    invalid = invalid_queries(spec, operands)
    if invalid is not None and not spec.is_backward:
        flags = jnp.where(invalid, INVALID, flags)
    flags = _repeated_by_head(flags, call.num_heads if call.head_rows_q else 1)
    if not spec.is_backward:
        return [flags]
    assert real.keys is not None
    of_keys = real.keys.astype(jnp.uint8)
    return [flags, _repeated_by_head(of_keys, call.num_kv_heads if call.head_rows_kv else 1)]


def _repeated_by_head(flags: jax.Array, heads: int) -> jax.Array:
    """[B, L] as [B · heads · L]."""
    return jnp.repeat(flags, heads, axis=0).reshape(-1)


def _clears_all(call: CudnnCall, real: jax.Array | None) -> bool:
    """Whether the custom call clears all padding rows: it cannot if they differ between heads."""
    return call.clears_rows and real is not None and real.shape[1] == 1


def _cleared(call: CudnnCall, real: jax.Array | None, x: jax.Array) -> jax.Array:
    """x [B, T, N, ·] with padding rows cleared; `real` is [1|B, 1|N, T]."""
    if real is None or _clears_all(call, real):
        return x
    return jnp.where(jnp.swapaxes(real, 1, 2)[..., None], x, 0)


def _with_padding_cleared(
    spec: AttentionSpec, call: CudnnCall, operands: Operands
) -> dict[str, jax.Array]:
    """The operands, with 0 in padding where cuDNN reads whole arrays."""
    if call.is_packed or call.decodes or not spec.has_runtime_lengths:
        return dict(operands)
    ranges = SequenceRanges.of(spec, operands)
    queries, keys = ranges.real_queries, ranges.real_keys
    real = {"query": queries, "out": queries, "out_grad": queries, "key": keys, "value": keys}
    return {
        name: jnp.where(real[name][..., None, None], x, 0) if name in real else x
        for name, x in operands.items()
    }


def _query_key_value(spec: AttentionSpec, call: CudnnCall, operands: Operands) -> list[jax.Array]:
    in_pages = "_pages" if spec.is_paged else ""
    return [
        _queries(spec, call, scaled_query(spec, operands["query"]), call.head_dim),
        _keys(call, operands[f"key{in_pages}"], call.head_dim),
        _keys(call, operands[f"value{in_pages}"], call.head_dim_v),
    ]


def _queries(spec: AttentionSpec, call: CudnnCall, x: jax.Array, dim: int) -> jax.Array:
    return _in_memory(call, pad_last(x[:, leading_padding_rows(spec) :], dim), call.head_rows_q)


def _keys(call: CudnnCall, x: jax.Array, dim: int) -> jax.Array:
    x = pad_last(x, dim)
    return _in_memory(call, flat_pages(x) if call.page_size else x, call.head_rows_kv)


def _in_memory(call: CudnnCall, x: jax.Array, head_rows: int) -> jax.Array:
    """x [B, L, heads, dim] with its axes in the order of the caller's memory.

    If the caller's array had that order, XLA cancels this transpose with the one that made x.
    """
    if head_rows:
        return jnp.swapaxes(x, 1, 2)
    return _to_rows(x) if call.is_packed else x


def _to_rows(x: jax.Array) -> jax.Array:
    """[B, L, …] as [B · L, …]."""
    return x.reshape(-1, *x.shape[2:])


def _from_memory(spec: AttentionSpec, x: jax.Array, head_rows: int, padding: int = 0) -> jax.Array:
    """A result as [B, L, heads, dim], with the rows that were cut off put back as 0."""
    if head_rows:
        x = jnp.swapaxes(x, 1, 2)
    return prepend(x.reshape(spec.batch, -1, *x.shape[-2:]), padding, axis=1, value=0)


def _all_rows(spec: AttentionSpec, x: jax.Array, *, value: float) -> jax.Array:
    """[1|B, 1|N, ·, S] with exactly the rows of the call; the kernel may have computed more."""
    padding = leading_padding_rows(spec)
    return prepend(x[:, :, : spec.seq_len_q - padding], padding, axis=2, value=value)


def _rows(call: CudnnCall, side: str, dim: int) -> jax.ShapeDtypeStruct:
    rows, length, heads, head_rows = (
        (call.packed_rows_q, call.seq_len_q, call.num_heads, call.head_rows_q)
        if side == "query"
        else (call.packed_rows_kv, call.seq_len_kv, call.num_kv_heads, call.head_rows_kv)
    )
    if head_rows:
        batch = rows // head_rows if call.is_packed else call.batch
        return jax.ShapeDtypeStruct((batch, heads, head_rows, dim), call.dtype)
    leading = (rows,) if call.is_packed else (call.batch, length)
    return jax.ShapeDtypeStruct((*leading, heads, dim), call.dtype)


def _statistic(call: CudnnCall) -> jax.ShapeDtypeStruct:
    if call.is_packed:
        return jax.ShapeDtypeStruct((call.packed_rows_q, call.num_heads), jnp.float32)
    return jax.ShapeDtypeStruct((call.batch, call.num_heads, call.seq_len_q), jnp.float32)


def _options(spec: AttentionSpec, call: CudnnCall, operands: Operands) -> list[jax.Array]:
    arrays: list[jax.Array] = []
    if call.has_lengths:
        arrays += lengths_and_offsets(spec, call, operands)
    if call.page_size:
        arrays.append(flat_table(spec, operands))
    if call.has_value_table:
        arrays.append(arrays[-1] + spec.meaning.value_page)
    if call.bias_dtype:
        arrays.append(score_bias(spec, call, operands))
    if has_nodes(spec):
        arrays += node_arrays(spec, call, operands)
    if call.has_sinks:
        arrays.append(operands["sinks"].astype(jnp.float32)[0])
    if call.dropout_rate:
        seed = kernel_seed(spec, operands)
        arrays += [seed, jnp.zeros_like(seed)]
    return arrays
