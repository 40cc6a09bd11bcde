"""The choice of AITER's kernel: where it is stricter than AITER's dispatch, and its reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.kernels import kernel_for, not_supported_reasons, unsupported_arch
from attn_dispatch.reason import Reason
from tests.support.aiter_dispatch import grid
from tests.support.aiter_dispatch.grid import CALL

BACKWARD = replace(CALL, backward=True, needs_lse=False)
GROUP = {"is_group": True}
CAUSAL = {"mask": "bottom_right", "window_right": 0}
WINDOW = {"mask": "bottom_right", "window_left": 128, "window_right": 0}
INT32 = "strides over 2**31 - 1 elements ({}): AITER counts elements in 32 bits"
D64, D192, D192_128 = (
    {"head_dim": q, "head_dim_v": v} for q, v in ((64, 64), (192, 192), (192, 128))
)


def _lengths(queries: int, keys: int) -> dict[str, Any]:
    return {
        "seq_len_q": queries, "seq_len_kv": keys, "max_seq_len_q": queries, "max_seq_len_kv": keys
    }  # fmt: skip


STRICTER = [
    (("gfx942", "gfx950"), replace(CALL, logits_soft_cap=30.0), "ASM would ignore logits_soft_cap"),
    (("gfx942", "gfx950"), replace(CALL, **_lengths(128, 512)), "forward with 128 queries"),
    (("gfx942", "gfx950"), replace(CALL, **GROUP, has_gaps=True), "gaps between packed sequences"),
    (("gfx942", "gfx950"), replace(CALL, batch=4096), "4 GiB or more in one array (query, key,"),
    (("gfx942", "gfx950"), replace(BACKWARD, **_lengths(16, 512)), "backward with 16 queries"),
    (("gfx942",), replace(BACKWARD, **GROUP), "backward of packed sequences: AITER reads their"),
    (("gfx950",), replace(BACKWARD, **WINDOW), "window (128, 0): gives NaN now and then on gfx950"),
    (
        ("gfx942",),
        replace(BACKWARD, **WINDOW, **_lengths(500, 512)),
        "window (128, 0), 500 queries and 512 keys: ASM reads lse beyond",
    ),
    (("gfx950",), replace(BACKWARD, **D64), "head dims (64, 64): on gfx950 AITER takes"),
    (("gfx950",), replace(BACKWARD, **D192), "head dims (192, 192): on gfx950 AITER takes"),
    (
        ("gfx950",),
        replace(BACKWARD, **D192_128, mask="top_left", window_right=0),
        "head dims (192, 128) and a top-left mask",
    ),
]


REMEDIES: dict[str, Callable[[AiterCall], AiterCall]] = {
    "aiter/asm_gaps": lambda call: replace(call, has_gaps=False),
    "aiter/asm_bytes": lambda call: replace(call, batch=1),
    "aiter/asm_dtype": lambda call: replace(call, dtype="bfloat16"),
    "aiter/asm_top_left": lambda call: replace(call, mask="bottom_right"),
    "aiter/asm_deterministic": lambda call: replace(call, deterministic=False),
}
"""For each rule, a function that applies the rule's remedy to a call."""


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_remedies_bring_the_call_to_asm(arch: str):
    """If a call follows all of its remedies, ASM runs it."""
    helped = Counter[str]()
    for call in (*grid.calls(), replace(CALL, batch=4096), replace(CALL, batch=4096, **CAUSAL)):
        if not_supported_reasons(call, arch) or not (why := kernel_for(call, arch).why_not_asm):
            continue
        if not why[0].remedy:
            assert not any(x.remedy for x in why)
            continue
        changed = call
        for reason in why:
            changed = REMEDIES[reason.rule](changed)
        assert kernel_for(changed, arch).family == "asm", (call, why)
        helped.update(x.rule for x in why)
    assert helped.keys() == REMEDIES.keys()


def test_no_remedy_where_a_single_row_is_too_large_for_asm():
    call = replace(CALL, **_lengths(2**22, 512))
    (why,) = kernel_for(call, "gfx942").why_not_asm
    assert (why.rule, why.remedy) == ("aiter/asm_bytes", "")


def test_no_remedy_for_one_of_two_reasons():
    call = replace(CALL, dtype="float16", logits_soft_cap=30.0)
    assert [x.remedy for x in kernel_for(call, "gfx942").why_not_asm] == ["", ""]


def test_unsetting_the_variable_is_the_remedy_if_only_it_prevents_asm(monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_AITER_ASM", "0")
    (why,) = kernel_for(CALL, "gfx942").why_not_asm
    assert why.remedy == "unset ATTN_DISPATCH_AITER_ASM"
    monkeypatch.delenv("ATTN_DISPATCH_AITER_ASM")
    assert kernel_for(CALL, "gfx942").family == "asm"


def texts(reasons: tuple[Reason, ...]) -> tuple[str, ...]:
    return tuple(map(str, reasons))


@pytest.mark.parametrize(
    ("arch", "call", "reason"),
    [(arch, call, reason) for archs, call, reason in STRICTER for arch in archs],
)
def test_ck_runs_calls_that_our_rules_keep_from_asm(arch: str, call: Any, reason: str):
    assert not_supported_reasons(call, arch) == ()
    kernel = kernel_for(call, arch)
    assert (kernel.family, kernel.accumulator, str(kernel)) == ("ck", "split", "ck")
    (why,) = kernel.why_not_asm
    assert reason in str(why)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (replace(CALL, dtype="float32"), "needs float16 or bfloat16, got float32"),
        (replace(CALL, head_dim_v=264), "head dims up to 256, got (128, 264)"),
        (replace(CALL, **GROUP, bias="bias"), "AITER has no bias with packed sequences or lengths"),
        (
            replace(BACKWARD, logits_soft_cap=30.0),
            "CK does not compute the gradient under logits_soft_cap",
        ),
        (
            replace(CALL, **_lengths(2**22, 512)),
            INT32.format("batch row of query, batch row of output"),
        ),
    ],
)
def test_a_call_that_no_kernel_runs_has_a_reason(arch: str, call: Any, reason: str):
    (found,) = not_supported_reasons(call, arch)
    assert str(found).startswith(reason.partition(":")[0])


@pytest.mark.parametrize(
    ("arch", "call", "name"),
    [
        ("gfx942", replace(CALL, **CAUSAL), "asm v3 bf16, rounding nearest even"),
        ("gfx950", replace(CALL, **D192_128), "ck"),
        ("gfx942", replace(CALL, **GROUP), "asm v3 bf16, rounding nearest even"),
        ("gfx942", replace(BACKWARD, dtype="float16", **D64), "asm v3 fp16, fp32 atomics"),
        (
            "gfx950",
            replace(BACKWARD, **GROUP, **CAUSAL, num_kv_heads=1),
            "asm v3 bf16, rounding nearest even, fp32 atomics",
        ),
        ("gfx942", replace(CALL, dtype="float16"), "ck"),
        ("gfx942", replace(BACKWARD, deterministic=True), "ck deterministic"),
    ],
)
def test_a_kernel_is_named_by_its_family_and_options(arch: str, call: Any, name: str):
    kernel = kernel_for(call, arch)
    assert str(kernel) == name
    assert (kernel.family == "asm") == (kernel.why_not_asm == ())


def test_every_reason_against_a_call_is_given():
    call = replace(CALL, dropout_rate=0.1, logits_soft_cap=30.0, bias="alibi", **D192_128)
    assert texts(kernel_for(call, "gfx942").why_not_asm) == (
        "no ASM kernel has ALiBi",
        "no ASM kernel has dropout",
        "forward needs head dims (128, 128), got (192, 128)",
        "ASM would ignore logits_soft_cap",
    )
    assert texts(not_supported_reasons(call, "gfx942")) == (
        "CK has no logits_soft_cap together with bias or ALiBi",
        "bias, ALiBi or dropout with head dims (192, 128): CK built these for inference alone",
    )


@pytest.mark.parametrize(
    ("call", "axes"),
    [
        (replace(CALL, **_lengths(2**22, 512)), "batch row of query, batch row of output"),
        (replace(CALL, **_lengths(2**21 - 1, 512)), ""),
        (replace(CALL, bias="bias", **_lengths(2**15, 2**13)), "batch row of bias"),
        (replace(BACKWARD, **GROUP, batch=4096, seq_len_q=2**31), "head of lse"),
    ],
)
def test_strides_over_32_bits_are_refused(call: Any, axes: str):
    assert texts(not_supported_reasons(call, "gfx942")) == ((INT32.format(axes),) if axes else ())


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("call", "layers"),
    [
        (replace(CALL, batch=65_535), ""),
        (replace(CALL, batch=65_536), "65536 batch rows"),
        (replace(CALL, **GROUP, batch=65_536), "65536 sequences"),
        (replace(CALL, num_heads=65_536, num_kv_heads=1, head_dim=8, **_lengths(64, 64)), ""),
        (replace(CALL, num_heads=1, num_kv_heads=1, **_lengths(128 * 65_535, 64)), ""),
        (
            replace(CALL, num_heads=1, num_kv_heads=1, **_lengths(128 * 65_535 + 1, 64)),
            "65536 tiles of 128 queries",
        ),
        (replace(BACKWARD, batch=65_536, head_dim=8, **_lengths(4, 4)), "65536 batch rows"),
        (
            replace(BACKWARD, num_heads=65_536, batch=65_536, head_dim=8, **_lengths(4, 4)),
            "65536 batch rows, 65536 heads",
        ),
    ],
)
def test_calls_larger_than_a_grid_are_refused(arch: str, call: Any, layers: str):
    small = replace(call, head_dim=8, head_dim_v=8)
    limit = "an AMD GPU's grid has at most 65535 workgroups along an axis"
    assert texts(not_supported_reasons(small, arch)) == ((f"{layers}: {limit}",) if layers else ())


@pytest.mark.parametrize(("queries", "is_run"), [(2044, True), (2045, False)])
@pytest.mark.parametrize("head_dim_v", [128, 64])
def test_gradients_of_splits_that_reach_4_gib_are_refused(
    queries: int, is_run: bool, head_dim_v: int
):
    """The 33rd split, of 16 batch rows and 8 heads, begins after 32 splits, and its first row ends
    at (32 · 16 + 1) · 2044 · 8 · 128 · 4 bytes, just below 4 GiB."""
    shape = {"batch": 16, "head_dim": 128, "head_dim_v": head_dim_v}
    call = replace(BACKWARD, deterministic=True, **shape, **_lengths(queries, 33 * 128))
    reasons = not_supported_reasons(call, "gfx950")
    assert bool(reasons) != is_run
    assert not reasons or str(reasons[0]).startswith("4 GiB or more of float32 gradients of query")


SPLIT = replace(
    CALL, is_split=True, seq_len_q=4, max_seq_len_q=4, page_size=128, num_pages=64, needs_lse=False
)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"page_size": 16},
            "key and value in pages of 16: CK's split-KV kernels take multiples of",
        ),
        ({"page_size": 192}, "key and value in pages of 192: CK's split-KV kernels take multiples"),
        ({"page_size": 256}, ""),
        ({"page_size": 0, "num_pages": 0}, ""),
        ({"head_dim": 192, "head_dim_v": 192}, ""),  # the kernel for head dim 256 takes it
        ({"head_dim_v": 264}, "head dims up to 256, got (128, 264)"),
        ({"bias": "bias"}, "CK has no bias with keys in pages"),
        ({"bias": "alibi", "mask": "bottom_right", "window_left": 600}, ""),
        (
            {"bias": "alibi", "logits_soft_cap": 3.0},
            "CK has no logits_soft_cap together with bias or ALiBi",
        ),
        ({"batch": 65_536}, "65536 batch rows: an AMD GPU's grid has at most 65535 workgroups"),
        ({"page_size": 2**21, "seq_len_kv": 2**22}, INT32.format("page of key, page of value")),
    ],
)
def test_split_kv_takes_a_call_or_gives_the_reason(arch: str, change: Any, reason: str):
    reasons = not_supported_reasons(replace(SPLIT, **change), arch)
    assert len(reasons) == bool(reason) and (not reason or str(reasons[0]).startswith(reason)), (
        reasons
    )


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "keys", "splits"),
    [
        (1, 8, 4, 131072, {"gfx942": 64, "gfx950": 57}),  # one request, 32 heads on 8 kv heads
        (1, 8, 4, 512, {"gfx942": 4, "gfx950": 4}),  # at most one for each tile of keys
        (1, 1, 32, 131072, {"gfx942": 114, "gfx950": 114}),
        (16, 8, 4, 8192, {"gfx942": 4, "gfx950": 4}),
        (64, 8, 4, 4096, {"gfx942": 1, "gfx950": 1}),  # enough workgroups without splits
        (1, 8, 4096, 4096, {"gfx942": 1, "gfx950": 1}),
    ],
)
def test_the_number_of_splits_depends_on_shape_and_gpu(batch, heads, rows, keys, splits):
    lengths = _lengths(rows, keys)
    call = replace(SPLIT, batch=batch, num_heads=heads, num_kv_heads=heads, **lengths)
    assert {arch: kernel_for(call, arch).num_splits for arch in splits} == splits
    parts = next(iter(splits.values()))
    name = f"ck split-KV, {parts} split{'s' if parts > 1 else ''}"
    assert str(kernel_for(call, "gfx942")) == name


def test_other_gpus_are_refused():
    (reason,) = not_supported_reasons(CALL, "gfx90a")
    assert str(reason) == "AITER's attention kernels run on gfx942 and gfx950, and this is gfx90a"
    assert unsupported_arch("gfx90a") == (reason,)
    assert unsupported_arch("gfx942") == ()
