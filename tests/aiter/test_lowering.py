"""Lowering for rocm on a machine without an AMD GPU: the custom calls, attributes and scratch."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch
from attn_dispatch import (
    aiter,
    dot_product_attention,
    explain,
    paged_attention,
    ragged_dot_product_attention,
)
from attn_dispatch.reason import sentences
from tests.support.lowered import calls_in

Q = jax.ShapeDtypeStruct((2, 256, 8, 128), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((2, 384, 2, 128), jnp.bfloat16)
CU = jax.ShapeDtypeStruct((5,), jnp.int32)


def lowered(function: Any, *avals: Any, gfx: str = "gfx942") -> dict[str, Any]:
    """The custom calls of a function and its gradients, lowered for rocm."""

    def both(*arrays):
        out, pull = jax.vjp(function, *arrays)
        return out, *pull(jnp.ones_like(out))

    with attn_dispatch.target(gfx):
        text = jax.jit(both).trace(*avals).lower(lowering_platforms=("rocm",)).as_text()
    return calls_in(text)


def attributes(line: str) -> dict[str, str]:
    (config,) = re.findall(r"backend_config = \{(.*?)\}", line)
    return dict(re.findall(r"(\w+) = (\"[^\"]*\"|[^,]+)", config))


def attend(q, k, v, **options):
    return dot_product_attention(q, k, v, scale=0.25, **options)


def test_a_dense_call_lowers_to_asm_kernels():
    def bottom_right(q, k, v):
        return attend(q, k, v, is_causal=True, causal_alignment="bottom_right")

    calls = lowered(bottom_right, Q, KV, KV)
    line, operands, results = calls[aiter.FORWARD_TARGET]
    assert operands == ["2x256x8x128xbf16", "2x384x2x128xbf16", "2x384x2x128xbf16"]
    assert results == ["2x256x8x128xbf16", "2x8x256xf32"]
    assert attributes(line) == {
        "arch": '"gfx942"', "generation": '"dev18"',
        "max_seq_len_q": "256 : i64", "max_seq_len_kv": "384 : i64",
        "has_gaps": "false", "scale": "2.500000e-01 : f32", "logits_soft_cap": "0.000000e+00 : f32",
        "dropout_rate": "0.000000e+00 : f32", "mask": '"bottom_right"', "window_left": "-1 : i64",
        "window_right": "0 : i64", "bias": '"none"', "use_asm": "true",
        "bf16_rounding": "0 : i64", "needs_lse": "true", "accumulator": '"split"',
        "deterministic": "false", "has_dbias": "false", "is_paged": "false",
        "heads_first_kv": "false", "value_page": "0 : i64",
        "num_splits": "1 : i64",
    }  # fmt: skip
    line, operands, results = calls[aiter.BACKWARD_TARGET]
    assert operands[3:] == ["2x256x8x128xbf16", "2x8x256xf32", "2x256x8x128xbf16"]
    assert results == [
        "2x256x8x128xbf16", "2x384x8x128xbf16", "2x384x8x128xbf16",
        "2x8x256xf32",  # softmax_d
        "2x8x256x128xf32",  # dq_acc
    ]  # fmt: skip
    assert attributes(line)["accumulator"] == '"atomic_32"'


def test_attn_dispatch_aiter_asm_switches_asm_kernels_off(monkeypatch):
    def use_asm() -> str:
        function = jax.jit(lambda q, k, v: attend(q, k, v))
        with attn_dispatch.target("gfx942"):
            text = function.trace(Q, KV, KV).lower(lowering_platforms=("rocm",)).as_text()
        return attributes(calls_in(text)[aiter.FORWARD_TARGET][0])["use_asm"]

    assert use_asm() == "true"
    with attn_dispatch.aiter_asm(False):
        assert use_asm() == "false"
    monkeypatch.setenv("ATTN_DISPATCH_AITER_ASM", "0")
    assert use_asm() == "false"
    why = "not asm: ASM kernels are switched off (ATTN_DISPATCH_AITER_ASM=0)"
    assert why in str(explain(Q, KV, KV, target="gfx942"))
    with attn_dispatch.aiter_asm(True):
        assert use_asm() == "true"
    monkeypatch.setenv("ATTN_DISPATCH_AITER_ASM", "no")
    with pytest.raises(ValueError, match="ATTN_DISPATCH_AITER_ASM: expected 0 or 1, got 'no'"):
        jax.jit(lambda q, k, v: attend(q, k, v)).trace(Q, KV, KV)


def test_a_deterministic_call_lowers_to_ck_kernels():
    calls = lowered(lambda q, k, v: attend(q, k, v, deterministic_backward=True), Q, KV, KV)
    line, _, results = calls[aiter.BACKWARD_TARGET]
    assert results[-1] == "3x2x256x8x128xf32"  # one dq_acc for each 128 keys
    assert attributes(line)["deterministic"] == "true"
    assert attributes(line)["use_asm"] == "false"


def test_a_bias_is_an_operand_and_its_gradient_a_result():
    bias = jax.ShapeDtypeStruct((8, 256, 384), jnp.bfloat16)
    calls = lowered(lambda q, k, v, bias: attend(q, k, v, bias=bias), Q, KV, KV, bias)
    _, operands, _ = calls[aiter.FORWARD_TARGET]
    assert operands[3] == "1x8x256x384xbf16"
    line, _, results = calls[aiter.BACKWARD_TARGET]
    assert results[3] == "2x256x8x384xbf16"
    assert attributes(line)["has_dbias"] == "true"


def test_a_bias_gradient_is_computed_only_if_it_is_asked_for():
    bias = jnp.zeros((8, 256, 384), jnp.bfloat16)
    calls = lowered(lambda q, k, v: attend(q, k, v, bias=bias), Q, KV, KV)
    assert len(calls[aiter.BACKWARD_TARGET][2]) == 5


def test_a_packed_call_lowers_without_a_batch_axis():
    q, kv = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (Q, KV))

    def packed(q, k, v, cu_seqlens):
        return ragged_dot_product_attention(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=200,
            max_seqlen_kv=150, is_causal=True,
        )  # fmt: skip

    with attn_dispatch.target("gfx950"):
        text = jax.jit(packed).trace(q, kv, kv, CU).lower(lowering_platforms=("rocm",)).as_text()
    line, operands, results = calls_in(text)[aiter.FORWARD_TARGET]
    assert operands == ["256x8x128xbf16", *["384x2x128xbf16"] * 2, "5xi32", "5xi32"]
    assert results == ["256x8x128xbf16"]
    assert attributes(line)["max_seq_len_q"] == "200 : i64"
    assert attributes(line)["arch"] == '"gfx950"'


TOKENS = 32768


def segments(q, k, v, ids):
    rows = (x[None] for x in (q, k, v))
    return dot_product_attention(
        *rows, query_segment_ids=ids[None], max_segments=64, is_causal=True, implementation="aiter"
    )[0]


def ragged(q, k, v, ids):
    cu_seqlens = jnp.searchsorted(ids, jnp.arange(1, 66)).astype(jnp.int32)
    return ragged_dot_product_attention(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=TOKENS,
        max_seqlen_kv=TOKENS, is_causal=True, implementation="aiter",
    )  # fmt: skip


@pytest.mark.parametrize("gfx", ["gfx942", "gfx950"])
@pytest.mark.parametrize("call", [segments, ragged])
def test_packed_sequences_of_32k_tokens_need_no_larger_array(call, gfx):
    """No array, scratch memory included, has more elements than the queries."""
    q, kv = (jax.ShapeDtypeStruct((TOKENS, n, 128), jnp.bfloat16) for n in (8, 2))
    ids = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)

    def step(q, k, v, ids, out_grad):
        out, pull = jax.vjp(lambda *qkv: call(*qkv, ids), q, k, v)
        return out, *pull(out_grad)

    with attn_dispatch.target(gfx):
        traced = jax.jit(step).trace(q, kv, kv, ids, q)
        text = traced.lower(lowering_platforms=("rocm",)).as_text()
    assert set(calls_in(text)) == {aiter.FORWARD_TARGET, aiter.BACKWARD_TARGET}
    shapes = set(re.findall(r"tensor<((?:\d+x)+)\w+>", text))
    largest = max(shapes, key=elements)
    assert elements(largest) == math.prod(q.shape), largest


def elements(shape: str) -> int:
    """The number of elements of a tensor type, written "2x3x" for [2, 3]."""
    return math.prod(map(int, shape.rstrip("x").split("x")))


def test_explain_gives_the_scratch_memory_of_the_call():
    def size(result: str) -> int:
        *dims, dtype = result.split("x")
        count = {"f32": 4, "bf16": 2, "i32": 4}[dtype]
        for dim in dims:
            count *= int(dim)
        return count

    _, _, results = lowered(attend, Q, KV, KV)[aiter.BACKWARD_TARGET]
    explanation = explain(Q, KV, KV, scale=0.25, target="gfx942")
    (verdict,) = (v for v in explanation.backward if v.implementation == "aiter")
    assert verdict.plan is not None
    # The user gets dq; dk and dv have a head for each query head and are scratch.
    assert verdict.plan.workspace_bytes == sum(map(size, results[1:]))


def test_explain_names_the_kernel_and_the_reasons_against_asm():
    text = str(explain(Q, KV, KV, local_window_size=(64, 0), target="gfx942"))
    assert "chosen    forward: aiter, backward: aiter" in text
    assert "AITER 0.1.7.post2.dev18" in text
    assert "runs: ck (not asm: forward with a window (64, 0)" in text
    text = str(explain(Q, KV, KV, target="gfx942"))
    assert (
        "forward   aiter   runs: asm v3 bf16, rounding nearest even, scratch memory 0 bytes" in text
    )


def test_explain_gives_every_reason_at_once():
    mask = jax.ShapeDtypeStruct((256, 384), jnp.bool_)
    sinks = jax.ShapeDtypeStruct((8,), jnp.float32)
    q, kv = (jax.ShapeDtypeStruct((*x.shape[:3], 264), jnp.bfloat16) for x in (Q, KV))
    found = {}
    for is_on in (True, False):
        with attn_dispatch.rewrites(is_on):
            explanation = explain(q, kv, kv, mask=mask, sinks=sinks, target="gfx942")
        (found[is_on],) = (v for v in explanation.forward if v.implementation == "aiter")
    assert (*map(str, found[True].reasons),) == ("head dims up to 256, got (264, 264)",)
    assert (*map(str, found[False].reasons),) == (
        "mask: not run through AITER by this version",
        "sinks: not run through AITER by this version",
        "head dims up to 256, got (264, 264)",
    )
    with (
        pytest.raises(NotImplementedError, match="head dims up to 256"),
        attn_dispatch.target("gfx942"),
    ):
        jax.jit(lambda q, k, v: dot_product_attention(q, k, v, implementation="aiter")).trace(
            q, kv, kv
        ).lower(lowering_platforms=("rocm",))


def test_lowering_without_a_target_asks_for_one():
    with pytest.raises(RuntimeError, match=r'attn_dispatch.target\("gfx942"\)'):
        jax.jit(attend).trace(Q, KV, KV).lower(lowering_platforms=("rocm",))


PAGES = jax.ShapeDtypeStruct((40, 128, 2, 128), jnp.bfloat16)
TABLE = jax.ShapeDtypeStruct((3, 64), jnp.int32)
LENGTHS = jax.ShapeDtypeStruct((3,), jnp.int32)


def inference_calls(function: Any, *avals: Any, gfx: str = "gfx942") -> dict[str, Any]:
    """The custom calls of a function, lowered for rocm without gradients."""
    with attn_dispatch.target(gfx):
        traced = jax.jit(function).trace(*avals)
        return calls_in(traced.lower(lowering_platforms=("rocm",)).as_text())


def queries(t: int, heads: int = 8) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((3, t, heads, 128), jnp.bfloat16)


@pytest.mark.parametrize(("gfx", "splits"), [("gfx942", 64), ("gfx950", 64)])
def test_decoding_reads_pages_in_place(gfx: str, splits: int):
    calls = inference_calls(paged_attention, queries(1), PAGES, PAGES, TABLE, LENGTHS, gfx=gfx)
    ((line, operands, results),) = calls.values()
    assert aiter.SPLIT_KV_TARGET in calls
    # The 4 query heads of a kv head are rows of one tile, and pages are read where they lie.
    pages = "40x128x2x128xbf16"
    assert operands == ["3x2x4x128xbf16", pages, pages, "3xi32", "3x64xi32"]
    assert results == [
        "3x2x4x128xbf16", f"3x2x{splits}x4xf32", f"3x2x{splits}x4x128xf32"
    ]  # fmt: skip
    assert attributes(line) == {
        "arch": f'"{gfx}"', "generation": '"dev18"',
        "max_seq_len_q": "4 : i64", "max_seq_len_kv": "8192 : i64",
        "has_gaps": "false", "scale": attributes(line)["scale"],
        "logits_soft_cap": "0.000000e+00 : f32", "dropout_rate": "0.000000e+00 : f32",
        "mask": '"none"', "window_left": "-1 : i64", "window_right": "-1 : i64", "bias": '"none"',
        "use_asm": "false", "bf16_rounding": "0 : i64", "needs_lse": "false",
        "accumulator": '"split"', "deterministic": "false", "has_dbias": "false",
        "is_paged": "true", "heads_first_kv": "false", "value_page": "0 : i64",
        "num_splits": f"{splits} : i64",
    }  # fmt: skip


def test_a_few_queries_and_their_heads_become_rows_of_one_tile():
    calls = inference_calls(paged_attention, queries(4), PAGES, PAGES, TABLE, LENGTHS)
    _, operands, results = calls[aiter.SPLIT_KV_TARGET]
    assert operands[0] == "3x2x16x128xbf16"
    assert results[1] == "3x2x16xf32"  # lse, by which the last keys are merged


def test_a_prompt_on_pages_keeps_its_heads():
    calls = inference_calls(paged_attention, queries(300), PAGES, PAGES, TABLE, LENGTHS)
    line, operands, _ = calls[aiter.SPLIT_KV_TARGET]
    assert operands[0] == "3x8x300x128xbf16"
    assert attributes(line)["mask"] == '"bottom_right"'


def test_a_few_queries_with_key_lengths_run_on_split_kv():
    def decode(q, k, v, lengths):
        return dot_product_attention(q, k, v, key_value_seq_lengths=lengths)

    cache = jax.ShapeDtypeStruct((3, 4096, 2, 128), jnp.bfloat16)
    line, operands, _ = inference_calls(decode, queries(1), cache, cache, LENGTHS)[
        aiter.SPLIT_KV_TARGET
    ]
    assert operands == ["3x2x4x128xbf16", *["3x4096x2x128xbf16"] * 2, "3xi32"]
    assert attributes(line)["is_paged"] == "false"
    many = inference_calls(decode, queries(17), cache, cache, LENGTHS)
    assert set(many) == {aiter.FORWARD_TARGET}


def test_pages_that_are_too_small_are_gathered_first():
    pages = jax.ShapeDtypeStruct((40, 64, 2, 128), jnp.bfloat16)
    calls = inference_calls(paged_attention, queries(1), pages, pages, TABLE, LENGTHS)
    line, operands, _ = calls[aiter.SPLIT_KV_TARGET]
    assert operands == ["3x2x4x128xbf16", *["3x4096x2x128xbf16"] * 2, "3xi32"]
    assert attributes(line)["is_paged"] == "false"


@pytest.mark.parametrize("gfx", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("page", "reason"), [(128, ""), (16, "pages of 16: CK's split-KV kernels")]
)
def test_explain_shows_whether_pages_are_gathered(gfx: str, page: int, reason: str):
    pages = jax.ShapeDtypeStruct((40, page, 2, 128), jnp.bfloat16)
    explanation = explain(
        queries(1), key_pages=pages, value_pages=pages, page_table=TABLE,
        key_value_seq_lengths=LENGTHS, target=gfx,
    )  # fmt: skip
    (verdict,) = (x for x in explanation.forward if x.implementation == "aiter")
    assert verdict.is_eligible and verdict.plan is not None
    assert verdict.plan.engine.startswith("ck split-KV, ")
    splits = int(verdict.plan.engine.split()[2])
    assert verdict.plan.workspace_bytes == 3 * 8 * splits * (128 + 1) * 4
    assert any("gathered" in x for x in verdict.rewrites) == bool(reason)
    assert reason in sentences(verdict.reasons_as_it_is)
