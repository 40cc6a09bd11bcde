"""An `AiterCall` as a struct of aiter_api.h, with the array layouts of the handlers."""

from __future__ import annotations

import ctypes
from typing import Any

from attn_dispatch.aiter.arrays import dq_acc, num_bytes, num_dq_acc
from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.kernels import Accumulator
from tests.support.aiter_dispatch import api

POINTER = 0x1000
"""An arbitrary address, since nothing here follows a pointer."""

_MASKS = {"none": 0, "top_left": 1, "bottom_right": 2}
_BIASES = {"none": 0, "bias": 1, "alibi": 2}
_ACCUMULATORS = {"split": 0, "atomic_32": 1, "atomic_16": 2}


def struct_of(
    call: AiterCall,
    *,
    use_asm: bool,
    rounding: int = 0,
    accumulator: Accumulator = "split",
    num_splits: int = 1,
    generation: str = "dev18",
):
    """The call as AttnAiterForward, AttnAiterBackward or AttnAiterSplitKv."""
    if call.is_split:
        return _split_kv_struct(call, num_splits)
    full = api.backward_struct() if call.backward else api.forward_struct()
    _fill_common(full.call, call)
    if call.has_gaps and generation != "dev18":
        full.call.seqlen_q = full.call.seqlen_k = None
        full.call.cu_seqlen_q = full.call.cu_seqlen_k = POINTER + 0x100
    full.call.use_asm, full.call.bf16_rounding = use_asm, rounding
    if call.backward:
        _fill_backward(full, call, accumulator)
    else:
        full.out, full.lse = POINTER, POINTER if call.needs_lse else None
        full.logits_soft_cap = call.logits_soft_cap
    return full


def _fill_common(common: Any, call: AiterCall) -> None:
    for name in ("batch", "seq_len_q", "seq_len_kv", "max_seq_len_q", "max_seq_len_kv",
                 "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "is_group",
                 "dropout_rate", "window_left", "window_right"):  # fmt: skip
        setattr(common, name, getattr(call, name))
    common.q = common.k = common.v = POINTER
    common.bias = POINTER if call.bias != "none" else None
    common.bias_kind = _BIASES[call.bias]
    common.dtype = 1 if call.dtype == "bfloat16" else 0
    common.mask = _MASKS[call.mask]
    common.scale = 0.125
    common.rng_state = POINTER if call.dropout_rate else None
    if call.is_group:
        common.seqstart_q = common.seqstart_k = POINTER
        common.seqlen_q = common.seqlen_k = POINTER if call.has_gaps else None
    if call.bias == "bias":
        common.stride_bias = call.seq_len_kv
        common.nhead_stride_bias = call.seq_len_q * call.seq_len_kv
        common.batch_stride_bias = call.num_heads * call.seq_len_q * call.seq_len_kv
    _set_strides(common, "q", call, call.seq_len_q, call.num_heads, call.head_dim)
    _set_strides(common, "k", call, call.seq_len_kv, call.num_kv_heads, call.head_dim)
    _set_strides(common, "v", call, call.seq_len_kv, call.num_kv_heads, call.head_dim_v)
    _set_strides(common, "out", call, call.seq_len_q, call.num_heads, call.head_dim_v)
    common.nhead_stride_lse = call.seq_len_q
    common.batch_stride_lse = 0 if call.is_group else call.num_heads * call.seq_len_q


def _split_kv_struct(call: AiterCall, num_splits: int):
    full = api.split_kv_struct()
    common = full.call
    _fill_common(common, call)
    common.seqlen_k = POINTER
    block = call.page_size or call.seq_len_kv
    rows, heads, dims = call.seq_len_q, call.num_heads, (call.head_dim, call.head_dim_v)
    for name, dim in zip(("q", "out"), dims, strict=True):
        _set(common, name, dim, rows * dim, heads * rows * dim)
    for name, dim in zip("kv", dims, strict=True):
        row = call.num_kv_heads * dim
        strides = (dim, block * dim) if call.heads_first_kv else (row, dim)
        _set(common, name, *strides, block * row)
    full.logits_soft_cap = call.logits_soft_cap
    full.out, full.lse = POINTER, POINTER if call.needs_lse else None
    full.lse_acc = full.out_acc = POINTER
    full.num_splits = num_splits
    if call.page_size:
        full.page_table, full.num_pages, full.page_size = POINTER, call.num_pages, call.page_size
        full.batch_stride_page_table = call.seq_len_kv // call.page_size
    part = rows * call.head_dim_v
    full.stride_out_acc, full.split_stride_out_acc, full.split_stride_lse_acc = (
        call.head_dim_v, part, rows
    )  # fmt: skip
    for name, size in (("out_acc", num_splits * part), ("lse_acc", num_splits * rows)):
        setattr(full, f"nhead_stride_{name}", size)
        setattr(full, f"batch_stride_{name}", heads * size)
    return full


def _fill_backward(full: Any, call: AiterCall, accumulator: Accumulator) -> None:
    for name in ("out", "lse", "out_grad", "dq", "dk", "dv", "softmax_d", "dq_acc"):
        setattr(full, name, POINTER)
    heads, dim = call.num_heads, call.head_dim
    _set_strides(full, "out_grad", call, call.seq_len_q, heads, call.head_dim_v)
    _set_strides(full, "dq", call, call.seq_len_q, heads, dim)
    _set_strides(full, "dk", call, call.seq_len_kv, heads, dim)
    _set_strides(full, "dv", call, call.seq_len_kv, heads, call.head_dim_v)
    if call.has_dbias:
        full.dbias = POINTER
        full.nhead_stride_dbias, full.stride_dbias = call.seq_len_kv, heads * call.seq_len_kv
        full.batch_stride_dbias = call.seq_len_q * full.stride_dbias
    full.is_deterministic = call.deterministic
    full.accumulator = _ACCUMULATORS[accumulator]
    full.dq_acc_bytes = num_bytes(dq_acc(call, accumulator))
    if accumulator == "split":
        _set_strides(full, "dq_acc", call, call.seq_len_q, heads, dim)
        if num_dq_acc(call) > 1:
            batches = 1 if call.is_group else call.batch
            split = batches * call.seq_len_q * heads * dim
            full.split_stride_dq_acc = ctypes.c_int32(split).value
    else:
        is_16 = accumulator == "atomic_16"
        rows = -(-call.max_seq_len_q // 16) * 16 if is_16 else call.seq_len_q
        width = (192 if dim == 192 else 128) if is_16 else dim
        full.stride_dq_acc, full.nhead_stride_dq_acc = width, rows * width
        full.batch_stride_dq_acc = 0 if call.is_group and not is_16 else heads * rows * width


def _set_strides(struct: Any, name: str, call: AiterCall, rows: int, heads: int, dim: int) -> None:
    """Set the strides of an array [batch, rows, heads, dim]; group mode has no batch axis."""
    batch = 0 if call.is_group else rows * heads * dim
    _set(struct, name, heads * dim, dim, batch)


def _set(struct: Any, name: str, row: int, head: int, batch: int) -> None:
    # A call whose stride does not fit is only checked for support, never run.
    setattr(struct, f"stride_{name}", row)
    setattr(struct, f"nhead_stride_{name}", head)
    setattr(struct, f"batch_stride_{name}", ctypes.c_int32(batch).value)
