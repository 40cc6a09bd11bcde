"""CK's kernels for head dim 64 in bfloat16 on the interpreter, launched as CK's host code does."""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cdna.decoder import Code
from tests.support.cdna.kernels import Gpu
from tests.support.cdna.machine import Machine
from tests.support.emulator.native import Backward, Forward, SplitKv

ATTENDS = "fmha_fwd_splitkv_d64_bf16_batch_*_vr_pssk_nlogits_nbias_nmask_lse_nsquant_*pagedkv*"
"""The name of kernels that attend to a part of the keys, which are in pages or not."""
KERNELS = {
    "forward": "fmha_fwd_d64_bf16_batch_*_psskddv_nlogits_nbias_nmask_lse_ndropout_*",
    "dot_do_o": "fmha_bwd_dot_do_o_d64_bf16_b64_batch_*_ps_*",
    "backward": "fmha_bwd_d64_bf16_batch_*_npad_nbias_ndbias_nmask_ndropout_ndeterministic_*",
    "convert_dq": "fmha_bwd_convert_dq_d64_bf16_*_batch_*_ps_ndeterministic_*",
    "split_kv": ATTENDS.replace("_*pagedkv", "_npagedkv"),
    "paged_split_kv": ATTENDS.replace("_*pagedkv", "_pagedkv"),
    "combine": "fmha_fwd_splitkv_combine_d64_bf16_batch_*_unused_ps_lse_*",
}
"""CK's names of the sources; tests/scripts/compile_ck.py compiles each to a file of ours."""
_PARTS = {
    "split_kv": "ELb1ELb0ELin1E",
    "paged_split_kv": "ELb1ELb0ELin1E",
    "combine": "CombineTraitsILb1ELb0ELb1ELb0ELi3E",
}
"""What is in the kernel's mangled name where a file has several, by their template arguments: rows
of different lengths, whose heads are not merged; up to 8 splits."""
_THREADS = 256
_QUERIES, _KEYS, _ROWS = 128, 128, 64
"""A workgroup's queries, forward; keys, backward; and rows of the kernels around the latter."""
_SPLIT_QUERIES, _SPLIT_COLUMNS, _COMBINED_ROWS, _COMBINED_COLUMNS = 64, 64, 8, 32
_MOST_SPLITS = 8


def folder() -> Path | None:
    """The folder of compiled kernels, if there is one."""
    found = os.environ.get("ATTN_DISPATCH_TEST_CK")
    return Path(found) if found else None


@dataclass
class CkGpu(Gpu):
    """A GPU that runs dense and split-KV calls without a mask on CK's machine code."""

    def serve(self, call: ctypes.Structure) -> str | None:
        """Run a call's kernels. Returns the sentence of a failure, or ""."""
        assert isinstance(call, (Forward, Backward, SplitKv))
        try:
            for name, grid, arguments in _LAUNCHES[type(call)](call):
                path = _path(name)
                self.run_kernel(path, (*grid, _THREADS), arguments, _PARTS.get(name, ""))
                self.ran.append(path.stem)
        except Exception as error:  # ctypes would drop it
            return f"{type(error).__name__}: {error}"
        return ""


def code_of(machine: Machine, name: str) -> Code:
    """A kernel's instructions."""
    return machine.load(_path(name), _PARTS.get(name, ""))[1]


def _path(name: str) -> Path:
    found = folder()
    assert found is not None
    return found / "gfx942" / f"{name}.co"


def _of(place: Any, names: str) -> list[int]:
    """The fields of a struct."""
    return [getattr(place, name) for name in names.split()]


_Launch = tuple[str, tuple[int, int, int], bytes]


def _forward(given: Any) -> list[_Launch]:
    """FmhaFwdBatchModeKargs with lse; there are no lengths of batch rows."""
    x = given.call
    arguments = struct.pack(
        "@4P6if8i0PP2i4i2P", *_of(x, "q k v"), given.out,
        *_of(x, "seq_len_q seq_len_kv head_dim head_dim_v num_heads"),
        x.num_heads // x.num_kv_heads, x.scale * math.log2(math.e),
        *_of(x, "stride_q stride_k stride_v stride_out"),
        *_of(x, "nhead_stride_q nhead_stride_k nhead_stride_v nhead_stride_out"),
        given.lse, *_of(x, "nhead_stride_lse batch_stride_lse"),
        *_of(x, "batch_stride_q batch_stride_k batch_stride_v batch_stride_out"), 0, 0,
    )  # fmt: skip
    return [("forward", (x.num_heads, -(-x.seq_len_q // _QUERIES), x.batch), arguments)]


def _backward(given: Any) -> list[_Launch]:
    """FmhaBwdOGradDotOBatchModeKargs, FmhaBwdBatchModeKargs, FmhaBwdConvertQGradBatchModeKargs."""
    x = given.call
    kept = 1.0
    sums = struct.pack(
        "@3Pf10i0P", given.out, given.out_grad, given.softmax_d, kept, x.seq_len_q, x.head_dim_v,
        given.stride_out_grad, x.stride_out, given.nhead_stride_out_grad, x.nhead_stride_out,
        x.nhead_stride_lse, given.batch_stride_out_grad, x.batch_stride_out, x.batch_stride_lse,
    )  # fmt: skip

    def strides(prefix: str) -> list[int]:
        lse = (
            [] if not prefix else [x.nhead_stride_lse if "nhead" in prefix else x.batch_stride_lse]
        )
        return [
            *_of(x, f"{prefix}stride_q {prefix}stride_k {prefix}stride_v"),
            getattr(given, f"{prefix}stride_out_grad"), *lse,
            *_of(given, f"{prefix}stride_dq_acc {prefix}stride_dk {prefix}stride_dv"),
        ]  # fmt: skip

    main = struct.pack(
        "@9P6i2f15i0P8i0P", *_of(x, "q k v"),
        *_of(given, "lse out_grad softmax_d dq_acc dk dv"),
        *_of(x, "seq_len_q seq_len_kv head_dim head_dim_v num_heads"),
        x.num_heads // x.num_kv_heads, x.scale, x.scale * math.log2(math.e),
        *strides(""), *strides("nhead_"), *strides("batch_"),
    )  # fmt: skip
    rounded = struct.pack(
        "@2P7i0P2i0P", given.dq_acc, given.dq, *_of(x, "seq_len_q seq_len_kv head_dim"),
        given.stride_dq, given.stride_dq_acc, given.nhead_stride_dq, given.nhead_stride_dq_acc,
        given.batch_stride_dq, given.batch_stride_dq_acc,
    )  # fmt: skip
    rows = -(-x.seq_len_q // _ROWS), x.num_heads, x.batch
    keys = -(-x.seq_len_kv // _KEYS), x.num_heads, x.batch
    return [("dot_do_o", rows, sums), ("backward", keys, main), ("convert_dq", rows, rounded)]


def _split_kv(given: Any) -> list[_Launch]:
    """BatchModeKargs of FmhaFwdSplitKVKernel, and of FmhaFwdSplitKVCombineKernel with lse."""
    x = given.call
    assert given.num_splits <= _MOST_SPLITS and given.lse
    no_cache_index = 0
    keys = (
        struct.pack("@P2i", *_of(given, "page_table batch_stride_page_table page_size"))
        if given.page_table
        else struct.pack("@P", no_cache_index)
    )
    attends = struct.pack(
        "@5P8if11i", *_of(x, "q k v"), *_of(given, "lse_acc out_acc"),
        *_of(x, "batch seq_len_q seq_len_kv head_dim head_dim_v num_heads"),
        x.num_heads // x.num_kv_heads, given.num_splits, x.scale * math.log2(math.e),
        *_of(x, "stride_q stride_k stride_v"), given.stride_out_acc,
        *_of(x, "nhead_stride_q nhead_stride_k nhead_stride_v"),
        *_of(given, "nhead_stride_lse_acc nhead_stride_out_acc"),
        *_of(given, "split_stride_lse_acc split_stride_out_acc"),
    ) + keys + struct.pack(
        "@P5i", x.seqlen_k, *_of(x, "batch_stride_q batch_stride_k batch_stride_v"),
        *_of(given, "batch_stride_lse_acc batch_stride_out_acc"),
    )  # fmt: skip
    combines = struct.pack(
        "@3P11i0P P5i", *_of(given, "lse_acc out_acc out"),
        *_of(x, "batch seq_len_q head_dim_v"), given.num_splits,
        given.stride_out_acc, x.stride_out,
        *_of(given, "nhead_stride_lse_acc nhead_stride_out_acc"), x.nhead_stride_out,
        *_of(given, "split_stride_lse_acc split_stride_out_acc"),
        given.lse, *_of(x, "nhead_stride_lse batch_stride_lse"),
        *_of(given, "batch_stride_lse_acc batch_stride_out_acc"), x.batch_stride_out,
    )  # fmt: skip
    tiles = -(-x.seq_len_q // _SPLIT_QUERIES) * -(-x.head_dim_v // _SPLIT_COLUMNS)
    parts = -(-x.seq_len_q // _COMBINED_ROWS) * -(-x.head_dim_v // _COMBINED_COLUMNS)
    name = "paged_split_kv" if given.page_table else "split_kv"
    return [
        (name, (tiles * given.num_splits, x.num_heads, x.batch), attends),
        ("combine", (parts, x.num_heads, x.batch), combines),
    ]


_LAUNCHES: dict[type, Callable[[Any], list[_Launch]]] = {
    Forward: _forward,
    Backward: _backward,
    SplitKv: _split_kv,
}
