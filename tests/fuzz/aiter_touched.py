"""The bytes that AITER's kernels touch, computed from the sizes and strides of aiter_api.h.

The computation follows the comments of aiter_api.h in Python's integers, and shares no code with
the handlers and the emulator.
"""

from __future__ import annotations

from typing import Any

from tests.support.emulator.native import Backward, SplitKv

_ALIBI = 2
_ATOMIC_32, _ATOMIC_16 = 1, 2


def touched(struct: Any, arch: str) -> list[tuple[str, int, int]]:
    """The name, the address and the number of bytes of every array that is not null."""
    if isinstance(struct, SplitKv):
        arrays = _of_split_kv(struct)
    else:
        arrays = _of_operands(struct.call)
        arrays += _of_backward(struct) if isinstance(struct, Backward) else _of_forward(struct)
    return [(name, at, width * _last(axes)) for name, at, width, axes in arrays if at]


def _last(axes: list[tuple[int, int]]) -> int:
    """The number of elements up to the last one. An axis is (size, stride)."""
    assert all(size > 0 and stride >= 0 for size, stride in axes), axes
    return 1 + sum((size - 1) * stride for size, stride in axes)


def _rows(struct: Any, call: Any, name: str, rows: int, heads: int, width: int) -> list:
    batch = 1 if call.is_group else call.batch
    strides = {x: getattr(struct, f"{x}stride_{name}") for x in ("batch_", "nhead_", "")}
    return [
        (batch, strides["batch_"]),
        (heads, strides["nhead_"]),
        (rows, strides[""]),
        (width, 1),
    ]


def _lse(call: Any) -> list[tuple[int, int]]:
    batch = 1 if call.is_group else call.batch
    return [
        (batch, call.batch_stride_lse),
        (call.num_heads, call.nhead_stride_lse),
        (call.seq_len_q, 1),
    ]


def _of_operands(call: Any) -> list:
    t, s, n, k = call.seq_len_q, call.seq_len_kv, call.num_heads, call.num_kv_heads
    arrays = [
        ("q", call.q, 2, _rows(call, call, "q", t, n, call.head_dim)),
        ("k", call.k, 2, _rows(call, call, "k", s, k, call.head_dim)),
        ("v", call.v, 2, _rows(call, call, "v", s, k, call.head_dim_v)),
        ("seqstart_q", call.seqstart_q, 4, [(call.batch + 1, 1)]),
        ("seqstart_k", call.seqstart_k, 4, [(call.batch + 1, 1)]),
        ("seqlen_q", call.seqlen_q, 4, [(call.batch, 1)]),
        ("seqlen_k", call.seqlen_k, 4, [(call.batch, 1)]),
        ("cu_seqlen_q", call.cu_seqlen_q, 4, [(call.batch + 1, 1)]),
        ("cu_seqlen_k", call.cu_seqlen_k, 4, [(call.batch + 1, 1)]),
        ("rng_state", call.rng_state, 8, [(2, 1)]),
    ]
    if call.bias_kind == _ALIBI:
        arrays.append(("bias", call.bias, 4, [(call.batch, call.stride_bias), (n, 1)]))
    else:
        arrays.append(("bias", call.bias, 2, _rows(call, call, "bias", t, n, s)))
    return arrays


def _of_forward(forward: Any) -> list:
    call = forward.call
    out = _rows(call, call, "out", call.seq_len_q, call.num_heads, call.head_dim_v)
    return [("out", forward.out, 2, out), ("lse", forward.lse, 4, _lse(call))]


def _of_backward(backward: Any) -> list:
    call = backward.call
    t, s, n = call.seq_len_q, call.seq_len_kv, call.num_heads
    h, v = call.head_dim, call.head_dim_v
    return [
        ("out", backward.out, 2, _rows(call, call, "out", t, n, v)),
        ("lse", backward.lse, 4, _lse(call)),
        ("softmax_d", backward.softmax_d, 4, _lse(call)),
        ("out_grad", backward.out_grad, 2, _rows(backward, call, "out_grad", t, n, v)),
        ("dq", backward.dq, 2, _rows(backward, call, "dq", t, n, h)),
        ("dk", backward.dk, 2, _rows(backward, call, "dk", s, n, h)),
        ("dv", backward.dv, 2, _rows(backward, call, "dv", s, n, v)),
        ("dbias", backward.dbias, 2, _rows(backward, call, "dbias", t, n, s)),
        _dq_acc(backward),
    ]


def _dq_acc(backward: Any) -> tuple:
    """The array dq_acc, whose layout is fixed in ASM kernels and given by strides in CK."""
    call, n = backward.call, backward.call.num_heads
    if backward.accumulator == _ATOMIC_16:
        # The layout is that of AITER's caller (csrc/py_itfs_cu/asm_mha_bwd.cu).
        rows, width = -(-call.max_seq_len_q // 16) * 16, 192 if call.head_dim == 192 else 128
        assert call.head_dim <= width, f"no kernel has head dim {call.head_dim}"
        return "dq_acc", backward.dq_acc, 2, [(call.batch * n * rows * width, 1)]
    if backward.accumulator == _ATOMIC_32:
        batch = 1 if call.is_group else call.batch
        return "dq_acc", backward.dq_acc, 4, [(batch * n * call.seq_len_q * call.head_dim, 1)]
    keys = 128 if max(call.head_dim, call.head_dim_v) <= 128 else 64
    splits = -(-call.max_seq_len_kv // keys) if backward.is_deterministic else 1
    axes = _rows(backward, call, "dq_acc", call.seq_len_q, n, call.head_dim)
    return "dq_acc", backward.dq_acc, 4, [*axes, (splits, backward.split_stride_dq_acc)]


def _of_split_kv(split: Any) -> list:
    call = split.call
    b, n, t, v = call.batch, call.num_heads, call.seq_len_q, call.head_dim_v
    pages = (split.num_pages, split.page_size) if split.page_table else (b, call.seq_len_kv)

    def keys(name: str, width: int) -> list[tuple[int, int]]:
        strides = {x: getattr(call, f"{x}stride_{name}") for x in ("batch_", "nhead_", "")}
        heads = (call.num_kv_heads, strides["nhead_"])
        return [(pages[0], strides["batch_"]), heads, (pages[1], strides[""]), (width, 1)]

    def part(name: str, stride: int, width: int) -> list[tuple[int, int]]:
        strides = {x: getattr(split, f"{x}_stride_{name}") for x in ("batch", "nhead", "split")}
        outer = [
            (b, strides["batch"]),
            (n, strides["nhead"]),
            (split.num_splits, strides["split"]),
        ]
        return [*outer, (t, stride), (width, 1)]

    slopes = [(b, call.stride_bias), (n, 1)]
    table = [(b, split.batch_stride_page_table)]
    if split.page_table:
        table.append((call.seq_len_kv // split.page_size, 1))
    return [
        ("q", call.q, 2, _rows(call, call, "q", t, n, call.head_dim)),
        ("k", call.k, 2, keys("k", call.head_dim)),
        ("v", call.v, 2, keys("v", v)),
        ("bias", call.bias, 4, slopes),
        ("seqlen_k", call.seqlen_k, 4, [(b, 1)]),
        ("page_table", split.page_table, 4, table),
        ("out", split.out, 2, _rows(call, call, "out", t, n, v)),
        ("lse", split.lse, 4, _lse(call)),
        ("lse_acc", split.lse_acc, 4, part("lse_acc", 1, 1)),
        ("out_acc", split.out_acc, 4, part("out_acc", split.stride_out_acc, v)),
    ]
