"""The rules of AITER v0.1.15 and later against its own dispatch, compiled from its sources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attn_dispatch.aiter.asm_rules import rules_of
from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.kernels import NO_CK, kernel_for, not_supported_reasons
from attn_dispatch.aiter.release import Release
from attn_dispatch.aiter.rules import DISPATCH
from attn_dispatch.devices.aiter_versions import version_of
from attn_dispatch.setting_blocks import aiter_asm
from tests.support.aiter_dispatch import grid
from tests.support.aiter_dispatch.calls import struct_of
from tests.support.aiter_dispatch.launches import ARCHS, atomic_32
from tests.support.aiter_v0_1_15 import build
from tests.support.aiter_v0_1_15.library import dispatch

NEWEST = Release("v0.1.15", (0, 1, 20))
RULES = rules_of(NEWEST)
needs_sources = pytest.mark.skipif(bool(build.missing_sources()), reason=build.missing_sources())


@needs_sources
@ARCHS
def test_asm_takes_the_calls_that_its_rules_allow(arch: str):
    """Rules of AITER's dispatch agree exactly; every other rule is stricter on purpose."""
    library, counts = dispatch(arch), {"asm": 0, "refused": 0, "stricter": 0}
    for call in grid.calls():
        rows = [rule for rule in RULES if rule.is_broken_by(call, arch)]
        # The front end asks nothing deterministic of ASM; its rules leave what is so anyway.
        struct = struct_of(
            replace(call, deterministic=False),
            use_asm=True,
            accumulator=atomic_32(call),
            generation=NEWEST.generation,
        )
        takes = library.takes_asm(struct)
        expected = all(rule.source != DISPATCH for rule in rows)
        assert takes == expected, (call, rows)
        counts["stricter" if takes and rows else "asm" if takes else "refused"] += 1
        reasons = not_supported_reasons(call, arch, NEWEST)
        assert [x.rule for x in reasons] == [rule.name for rule in rows]
        if takes and not rows:
            kernel = kernel_for(call, arch, NEWEST)
            assert (kernel.family, kernel.why_not_asm) == ("asm", ())
            failed, records = library.run(struct)
            assert not failed and all(x.split()[2] == arch for x in records), call
    assert sum(counts.values()) >= 2000
    assert min(counts.values()) >= 50, counts


CAUSAL = {"mask": "bottom_right", "window_right": 0}
PACKED = {"is_group": True, "has_gaps": True, "max_seq_len_q": 256}
WIDE = {"head_dim": 192}
NEWLY = {
    "gaps": (PACKED, ("gfx942", "gfx950")),
    "gradients of packed sequences": ({**PACKED, "backward": True}, ("gfx942", "gfx950")),
    "192/128": (WIDE, ("gfx942", "gfx950")),
    "gradients of causal 192/128": ({**WIDE, **CAUSAL, "backward": True}, ("gfx950",)),
    "gradients from the top left": (
        {**WIDE, **CAUSAL, "mask": "top_left", "backward": True}, ("gfx950",)
    ),
    "gradients of one key": (
        {"mask": "top_left", "window_left": 0, "window_right": 0, "backward": True}, ("gfx942",)
    ),
    "few queries": ({"seq_len_q": 3, "max_seq_len_q": 3}, ("gfx942", "gfx950")),
    "gradients of few queries": (
        {"seq_len_q": 2, "max_seq_len_q": 2, "backward": True}, ("gfx942", "gfx950")
    ),
}  # fmt: skip


@pytest.mark.parametrize("facts, archs", NEWLY.values(), ids=NEWLY)
def test_calls_that_dev18_gives_to_ck_run_on_asm(facts: dict[str, Any], archs: tuple[str, ...]):
    call = replace(grid.CALL, **facts)
    for arch in ("gfx942", "gfx950"):
        assert (not not_supported_reasons(call, arch, NEWEST)) == (arch in archs)
    assert all(kernel_for(call, arch).family == "ck" for arch in archs if call.head_dim == 128)


@pytest.mark.parametrize("backward", [False, True])
def test_a_soft_cap_is_refused_in_both_directions(backward: bool):
    """AITER would leave it out without a word."""
    call = replace(grid.CALL, logits_soft_cap=30.0, backward=backward)
    for arch in ("gfx942", "gfx950"):
        (why,) = not_supported_reasons(call, arch, NEWEST)
        expected = (
            "no kernel computes the gradient under logits_soft_cap"
            if backward
            else f"ASM would ignore logits_soft_cap ({NO_CK})"
        )
        assert str(why) == expected


_FORWARD = "forward needs head dims (128, 128) or (192, 128), or narrower ones padded to these"
_BACKWARD = {
    "gfx942": "backward needs equal head dims from 64 to 192, or narrower ones padded to these",
    "gfx950": "backward needs equal head dims from 72 to 128, or (192, 128) without packing, or "
    "narrower ones padded to these",
}


@ARCHS
@pytest.mark.parametrize("head_dim", [256, 512])
def test_reasons_name_the_head_dims_that_run(head_dim: int, arch: str):
    """And CK only for calls that it would run."""
    for backward, text in ((False, _FORWARD), (True, _BACKWARD[arch])):
        call = replace(grid.CALL, head_dim=head_dim, head_dim_v=head_dim, backward=backward)
        (why,) = not_supported_reasons(call, arch, NEWEST)
        note = f" ({NO_CK})" if head_dim == 256 else ""
        assert str(why) == f"{text}, got ({head_dim}, {head_dim}){note}"


@pytest.mark.parametrize(
    "facts, is_refused",
    [
        ({}, True), ({"mask": "bottom_right", "window_right": 0}, True), ({"batch": 1}, False),
        ({"seq_len_q": 2, "max_seq_len_q": 2}, False), ({"is_group": True}, False),
        ({"head_dim": 192}, False), ({"backward": False}, False),
    ],
)  # fmt: skip
def test_one_query_of_several_batch_rows_is_refused_on_gfx950(
    facts: dict[str, Any], is_refused: bool
):
    call = replace(grid.CALL, backward=True, seq_len_q=1, max_seq_len_q=1, batch=3)
    call = replace(call, **facts)
    for arch in ("gfx942", "gfx950"):
        rules = [x.rule for x in not_supported_reasons(call, arch, NEWEST)]
        assert ("aiter/asm_backward_one_query" in rules) == (is_refused and arch == "gfx950")


ONE_BLOCK = {"backward": True, "deterministic": True, "seq_len_kv": 256, "max_seq_len_kv": 256}


@pytest.mark.parametrize(
    "facts, archs",
    [
        ({}, ("gfx950",)), ({"head_dim": 72, "head_dim_v": 72}, ("gfx950",)),
        ({"seq_len_kv": 257, "max_seq_len_kv": 257}, ()), (PACKED, ()),
        ({"head_dim": 64, "head_dim_v": 64}, ()), ({"head_dim": 192}, ()),
    ],
)  # fmt: skip
def test_one_block_of_keys_is_deterministic_on_gfx950(facts: dict[str, Any], archs: tuple[str]):
    call = replace(grid.CALL, **ONE_BLOCK)
    call = replace(call, **facts)
    for arch in ("gfx942", "gfx950"):
        rules = [x.rule for x in not_supported_reasons(call, arch, NEWEST)]
        assert any("deterministic" in x for x in rules) == (arch not in archs)


OF_CK: dict[str, tuple[AiterCall, str]] = {
    "fp16": (replace(grid.CALL, dtype="float16"), "forward needs bfloat16, got float16"),
    "dropout": (replace(grid.CALL, dropout_rate=0.1), "no ASM kernel has dropout"),
    "bias": (replace(grid.CALL, bias="bias"), "no ASM kernel has a bias"),
    "window": (replace(grid.CALL, mask="bottom_right", window_left=64, window_right=0), "window"),
    "deterministic": (
        replace(grid.CALL, backward=True, deterministic=True), "deterministic: ASM adds with"
    ),
    "split-KV": (grid.split_calls()[0], "only CK has split-KV kernels"),
}  # fmt: skip


@ARCHS
@pytest.mark.parametrize("call, reason", OF_CK.values(), ids=OF_CK)
def test_without_ck_a_reason_says_so(call: AiterCall, reason: str, arch: str):
    (why,) = not_supported_reasons(call, arch, NEWEST)
    assert reason in str(why) and str(why).endswith(" (this AITER is built without CK)")


def test_without_ck_a_call_is_refused_where_asm_is_switched_off():
    assert not_supported_reasons(grid.CALL, "gfx942", NEWEST) == ()
    with aiter_asm(False):
        (why,) = not_supported_reasons(grid.CALL, "gfx942", NEWEST)
    assert str(why).endswith("(ATTN_DISPATCH_AITER_ASM=0) (this AITER is built without CK)")


@pytest.mark.parametrize(
    "version, is_refused", [("0.1.15.post3", True), ("v0.1.17", True), ("v0.1.18", False)]
)
def test_what_an_older_version_computes_wrongly_is_refused_by_name(version: str, is_refused: bool):
    call = replace(grid.CALL, head_dim=192)
    number = version_of(version)
    assert number is not None
    reasons = not_supported_reasons(call, "gfx950", Release("v0.1.15", number))
    assert bool(reasons) == is_refused
    assert not not_supported_reasons(call, "gfx942", Release("v0.1.15", number))
    if is_refused:
        assert "right since v0.1.18" in str(reasons[0])
        assert reasons[0].remedy == "build AITER v0.1.18 or newer"


def test_versions_are_read_from_tags_and_wheels():
    expected = {
        "v0.1.19": (0, 1, 19), "0.1.20.post1": (0, 1, 20), "0.1.20.dev3+g12": (0, 1, 19),
        "v0.1.15-rc0": (0, 1, 14), "v0.1.19-35-gabcdef": (0, 1, 19),
        "0.1.19.post1.dev2": (0, 1, 19), "main": None,
    }  # fmt: skip
    assert {x: version_of(x) for x in expected} == expected


def test_rules_of_a_release_have_distinct_names():
    names = [rule.name for rule in rules_of(Release("v0.1.15", (0, 1, 15)))]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "queries, keys, is_refused",
    [
        (300, 257, True), (300, 320, True), (100, 513, True), (300, 256, False), (300, 512, False),
        (320, 320, False), (300, 200, False),
    ],
)  # fmt: skip
def test_keys_beyond_whole_tiles_are_refused_from_the_bottom_right(
    queries: int, keys: int, is_refused: bool
):
    lengths = {"seq_len_q": queries, "max_seq_len_q": queries}
    lengths |= {"seq_len_kv": keys, "max_seq_len_kv": keys}
    call = replace(grid.CALL, backward=True, **CAUSAL, **lengths)
    (why,) = not_supported_reasons(call, "gfx950", NEWEST) or (None,)
    assert (why is not None) == is_refused
    assert why is None or str(why).startswith(f"backward with a bottom-right mask and {keys} keys")
    others = (
        replace(call, mask="top_left"), replace(call, mask="none", window_right=-1),
        replace(call, is_group=True), replace(call, head_dim=192), replace(call, backward=False),
    )  # fmt: skip
    assert all(not not_supported_reasons(x, "gfx950", NEWEST) for x in others)
    assert not not_supported_reasons(call, "gfx942", NEWEST)
    assert kernel_for(call, "gfx950").family == "asm"  # dev18's kernel is right
