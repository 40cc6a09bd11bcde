"""Structs of aiter_api.h in which every field has a value of its own, and AITER's names of them."""

from __future__ import annotations

import ctypes
from typing import Any


def fill_distinctly(struct: Any) -> dict[str, str]:
    """Give every field a distinct value; return what AITER should get, by this project's names."""
    chosen = {"dtype": 1, "is_group": 1, "mask": 2, "bias_kind": 1, "use_asm": 1, "accumulator": 1,
              "bf16_rounding": 2, "is_deterministic": 1, "head_dim": 104,
              "head_dim_v": 104}  # fmt: skip
    floats = {"scale": 0.5, "dropout_rate": 0.25, "logits_soft_cap": 30.0}
    given: dict[str, str] = {}

    def fill(part: Any) -> None:
        for name, kind in part._fields_:
            value: Any = chosen.get(name, floats.get(name, 1000 + 16 * len(given)))
            if isinstance(getattr(part, name), ctypes.Structure):
                fill(getattr(part, name))
                continue
            setattr(part, name, value)
            given[name + "_ptr" * (kind is ctypes.c_void_p and name != "rng_state")] = str(value)

    fill(struct)
    for name in (*floats, "dtype"):
        given.pop(name, None)
    return given


def aiter_name(name: str) -> str:
    """AITER's name for a field of aiter_api.h."""
    exact = {
        "is_group": "is_group_mode", "bias_kind": "bias", "use_asm": "use_ext_asm",
        "bf16_rounding": "how_v3_bf16_cvt", "is_deterministic": "deterministic",
        "num_heads": "nhead_q", "num_kv_heads": "nhead_k", "head_dim": "hdim_q",
        "head_dim_v": "hdim_v", "page_table_ptr": "block_table_ptr",
        "batch_stride_page_table": "batch_stride_block_table", "page_size": "page_block_size",
        "out_acc_ptr": "o_acc_ptr", "window_left": "window_size_left",
        "window_right": "window_size_right", "seq_len_q": "seqlen_q", "seq_len_kv": "seqlen_k",
        "max_seq_len_q": "max_seqlen_q", "max_seq_len_kv": "max_seqlen_k", "out_ptr": "o_ptr",
        "out_grad_ptr": "do_ptr", "softmax_d_ptr": "d_ptr",
    }  # fmt: skip
    if name in exact:
        return exact[name]
    for ours, theirs in (("_out_grad", "_do"), ("_out", "_o"), ("_out_acc", "_o_acc")):
        if "stride" in name and name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name
