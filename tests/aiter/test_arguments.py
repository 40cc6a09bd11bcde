"""Every argument of a call reaches AITER, by its name and with its value."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.aiter_dispatch import api, build, grid
from tests.support.aiter_dispatch.arguments import aiter_name, fill_distinctly
from tests.support.aiter_dispatch.calls import struct_of

pytestmark = pytest.mark.skipif(
    isinstance(build.tools(), str), reason=str(build.tools()).replace("\n", " ")
)


def test_every_split_kv_argument_reaches_aiter(libraries: tuple[api.Library, api.Library]):
    struct = api.split_kv_struct()
    given = fill_distinctly(struct)
    struct.num_splits, struct.logits_soft_cap = 7, 30.0
    failed, records = libraries[1].run(struct, stream=0xABC0)
    assert not failed, failed
    got = dict(line.split(" ", 1) for line in records)
    expected = {aiter_name(name): value for name, value in given.items()} | {
        "dtype": "bf16", "stream": str(0xABC0), "time_kernel": "0", "mask_type": given["mask"],
        "scale_s": "0.500000", "scale_p": "1.000000", "scale_o": "1.000000", "has_lse": "1",
        "logits_soft_cap": "30.000000", "num_splits": "7", "is_gappy": "0", "cache_batch_idx": "0",
    }  # fmt: skip
    for name in ("cu_seqlen_q_ptr", "cu_seqlen_k_ptr", "rng_state", "seqlen_q_ptr", "max_seqlen_k",
                 "use_ext_asm", "how_v3_bf16_cvt", "num_pages"):  # fmt: skip
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
    given = fill_distinctly(struct)
    failed, records = capture.run(struct, stream=0xABC0)
    assert not failed, failed
    got = dict(line.split(" ", 1) for line in records)
    expected = {aiter_name(name): str(value) for name, value in given.items()} | {
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
    for name in ("rng_state", "accumulator", "dq_acc_bytes"):
        expected.pop(name, None)
    assert got == expected


def test_without_dropout_the_seed_is_zero(libraries: tuple[api.Library, api.Library]):
    _, records = libraries[1].run(struct_of(grid.CALL, use_asm=False))
    assert {"drop_on_device 0", "drop_seed 0", "drop_offset 0", "p_drop 0.000000"} < set(records)
