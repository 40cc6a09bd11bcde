"""Every argument of a call reaches AITER, by its name and with its value."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.support.aiter_dispatch import api, build, grid
from tests.support.aiter_dispatch.calls import struct_of

pytestmark = pytest.mark.skipif(
    isinstance(build.tools(), str), reason=str(build.tools()).replace("\n", " ")
)


def test_every_split_kv_argument_reaches_aiter(libraries: tuple[api.Library, api.Library]):
    struct = api.split_kv_struct()
    given = _fill_distinctly(struct)
    struct.num_splits, struct.logits_soft_cap = 7, 30.0
    failed, records = libraries[1].run(struct, stream=0xABC0)
    assert not failed, failed
    got = dict(line.split(" ", 1) for line in records)
    expected = {_aiter_name(name): value for name, value in given.items()} | {
        "dtype": "bf16", "stream": str(0xABC0), "time_kernel": "0", "mask_type": given["mask"],
        "scale_s": "0.500000", "scale_p": "1.000000", "scale_o": "1.000000", "has_lse": "1",
        "logits_soft_cap": "30.000000", "num_splits": "7", "is_gappy": "0", "cache_batch_idx": "0",
    }  # fmt: skip
    for name in ("rng_state", "seqlen_q_ptr", "max_seqlen_k", "use_ext_asm", "how_v3_bf16_cvt",
                 "num_pages"):  # fmt: skip
        expected.pop(name)
    assert got == expected


@pytest.mark.parametrize("backward", [False, True])
def test_every_argument_reaches_aiter(
    libraries: tuple[api.Library, api.Library], aiter_on: Any, backward: bool
):
    aiter_on("gfx950")
    capture = libraries[1]
    capture.set_asm_folder("gfx950", build.asm_folder("gfx950"))
    capture.set_gpu("gfx950")
    struct = api.backward_struct() if backward else api.forward_struct()
    given = _fill_distinctly(struct)
    failed, records = capture.run(struct, stream=0xABC0)
    assert not failed, failed
    got = dict(line.split(" ", 1) for line in records)
    expected = {_aiter_name(name): str(value) for name, value in given.items()} | {
        "dtype": "bf16", "stream": str(0xABC0), "time_kernel": "0", "rand_val_ptr": "0",
        "drop_on_device": "1", "drop_seed": given["rng_state"],
        "drop_offset": str(int(given["rng_state"]) + 8), "p_drop": "0.250000",
        "cu_seqlen_q_ptr": "0", "cu_seqlen_k_ptr": "0", "stride_randval": "0",
        "nhead_stride_randval": "0", "batch_stride_randval": "0", "mask_type": given["mask"],
    }  # fmt: skip
    if backward:
        expected |= {
            "scale": "0.500000", "p_undrop": "0.750000", "has_dbias": "1", "is_store_randval": "0",
            "is_v3_atomic_fp32": "1", "seqlen_q_padded": "0", "seqlen_k_padded": "0",
        }  # fmt: skip
        for name in ("nhead_stride_lse", "batch_stride_lse"):
            expected[f"{name}d"] = expected.pop(name)
    else:
        expected |= {
            "scale_s": "0.500000", "scale_p": "1.000000", "scale_o": "1.000000", "has_lse": "1",
            "logits_soft_cap": "30.000000", "min_seqlen_q": "0", "s_randval": "0",
            "seqstart_q_padding_ptr": "0", "seqstart_k_padding_ptr": "0",
        }  # fmt: skip
        expected.pop("max_seqlen_k")  # mha_fwd has no use for it
    for name in ("rng_state", "accumulator"):
        expected.pop(name, None)
    assert got == expected


def test_without_dropout_the_seed_is_zero(libraries: tuple[api.Library, api.Library]):
    _, records = libraries[1].run(struct_of(grid.CALL, use_asm=False))
    assert {"drop_on_device 0", "drop_seed 0", "drop_offset 0", "p_drop 0.000000"} < set(records)


def _fill_distinctly(struct: Any) -> dict[str, str]:
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


def _aiter_name(name: str) -> str:
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
