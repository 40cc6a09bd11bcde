"""Specs as cuDNN's calls: variants, bands, padding and the rules that refuse a call."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn import rules as cudnn_rules
from attn_dispatch.cudnn.call import (
    Band,
    CudnnCall,
    band_of,
    variants_of,
)
from attn_dispatch.cudnn.score_nodes import score_rules_of
from attn_dispatch.devices import native_libraries
from attn_dispatch.programs.tracing import trace
from attn_dispatch.semantics import lse_grad
from attn_dispatch.semantics.common_rules import DTYPE
from attn_dispatch.semantics.real_rows import leading_padding_rows
from attn_dispatch.semantics.wider_arrays import round_up
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from attn_dispatch_tools.verify.reference import allowed_pairs, relative_positions
from attn_dispatch_tools.verify.sizes import BOTTOM_RIGHT, CAUSAL, Packed, case
from tests.support.backend import backward_spec, forward_spec, needs_cudnn
from tests.support.option_parts import spec_with
from tests.support.repository import ROOT

SPEC_H = ROOT / "cuda_backend" / "spec.h"


def spec(**facts: Any) -> AttentionSpec:
    return forward_spec(case("call", **facts))


def test_attributes_match_spec_h():
    text = SPEC_H.read_text()
    names = re.findall(r"FIELD\(\w+, (\w+)\)", text[text.index("FIELD(bool") :])
    assert names[: len(fields(CudnnCall))] == [field.name for field in fields(CudnnCall)]


def test_variants_of_a_dense_call():
    plain, padded, packed = variants_of(spec())
    assert (plain.has_lengths, plain.is_packed) == (False, False)
    assert (padded.has_lengths, padded.is_packed) == (True, False)
    assert (packed.has_lengths, packed.is_packed) == (True, True)
    assert packed.packed_rows_q == packed.batch * packed.seq_len_q


def test_call_with_lengths_is_packed_first():
    packed, padded = variants_of(spec(q_lengths=(1, 0.5), kv_lengths=(0.5, 1)))
    assert packed.is_packed and not padded.is_packed and padded.has_lengths
    assert packed.clears_rows and padded.clears_rows


def test_segments_become_sequences():
    ids = Packed((((1, 0.5), (2, 0.25)), ((1, 0.25),)))
    (call,) = variants_of(spec(packed=ids, max_segments=5))
    assert (call.batch, call.packed_rows_q, call.seq_len_q) == (2 * 5, 2 * 256, 256)


def test_packed_call_has_at_least_two_queries():
    *_, packed = variants_of(spec(t=1))
    assert (packed.seq_len_q, packed.packed_rows_q) == (2, 2)


@needs_cudnn
def test_packed_call_of_one_query_is_no_wrong_call():
    *_, packed = variants_of(spec(b=1, t=1))
    assert (packed.seq_len_q, packed.packed_rows_q) == (2, 1)
    native = native_libraries.load(native_libraries.CUDA)
    assert native.buffers(packed.attributes)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, Band(-1, -1, bottom_right=False)),
        (CAUSAL, Band(-1, 0, bottom_right=False)),
        ({"window": (3, 2**40)}, Band(3, -1, bottom_right=False)),
        (BOTTOM_RIGHT, Band(-1, 0, bottom_right=False)),  # as many queries as keys
        ({"t": 128, **BOTTOM_RIGHT}, Band(-1, 0, bottom_right=True)),
        ({"t": 128, "bias": "11ts", **BOTTOM_RIGHT}, Band(-1, 128, False)),
        ({"t": 128, "alibi": 1, "alignment": "bottom_right"}, Band(-1, -1, False)),
        ({"t": 128, "dropout": 0.1, "window": (200, 4), "alignment": "bottom_right"},
         Band(72, 132, False)),
        # The window begins after the first key, which no top-left window can express.
        ({"t": 128, "dropout": 0.1, "window": (20, 4), "alignment": "bottom_right"}, None),
        ({"bias": "11ts", "q_lengths": (1, 0.5), **BOTTOM_RIGHT}, None),
    ],
)  # fmt: skip
def test_band_of_a_call(facts: dict[str, Any], expected: Band | None):
    assert band_of(spec(**facts)) == expected


LEFT, RIGHT = (None, 0, 1, 3, 9), (None, 0, 2, 9)
SHAPES = ((4, 4), (3, 7), (7, 3), (1, 5), (5, 1))
ROWS = [
    {"window": (left, right), "is_causal": is_causal, "alignment": alignment}
    for left in LEFT
    for right in RIGHT
    for is_causal in (False, True)
    for alignment in ("top_left", "bottom_right")
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("extra", [{}, {"dropout": 0.1}, {"alibi": 1}], ids=str)
def test_bands_describe_the_pairs_that_attend(shape: tuple[int, int], extra: dict[str, Any]):
    """Every window, causality and alignment without lengths, compared with every pair."""
    t, s = shape
    for row in ROWS:
        small = Case("band", t=t, s=s, b=1, **row, **extra)
        options, operands = small.forward_options(), small.operands()
        call = spec_of(options, operands)
        band, padding = band_of(call), leading_padding_rows(call)
        pairs = allowed_pairs(options, operands, 0)[0]
        i, j = np.arange(t - padding)[:, None], np.arange(s)
        offset = s - (t - padding)
        left, right = row["window"][0], 0 if row["is_causal"] else row["window"][1]
        starts_inside = left is not None and offset > left
        ends_outside = right is not None and right < -offset
        if extra and row["alignment"] == "bottom_right" and (starts_inside or ends_outside):
            assert band is None, row
            continue
        assert band is not None, row
        diagonal = i + (s - (t - padding) if band.bottom_right else 0)
        in_band = np.ones_like(pairs[padding:])
        in_band &= (band.left < 0) | (j >= diagonal - band.left)
        in_band &= (band.right < 0) | (j <= diagonal + band.right)
        assert not pairs[:padding].any() and (pairs[padding:] == in_band).all(), (row, band)
        if extra:
            ids = np.ones(t, int), np.ones(s, int)
            distance = relative_positions(options, *ids)[padding:]
            assert not band.bottom_right
            alibi = score_rules_of(call).alibi
            assert (alibi is None) == ("alibi" not in extra)
            if alibi is not None:
                assert (distance == j - (i + padding + alibi.offset)).all(), row
                assert not alibi.is_one_sided or (distance <= 0)[pairs[padding:]].all(), row


@pytest.mark.parametrize("extra", [{"dropout": 0.1}, {"alibi": 1}, {"bias": "11ts"}], ids=str)
def test_window_side_wider_than_the_arrays_is_open(extra: dict[str, Any]):
    facts = {"t": 128, "alignment": "bottom_right", **extra}
    wide, opened = (spec(window=(200, right), **facts) for right in (128 + 256, None))
    assert variants_of(wide) == variants_of(opened)


@pytest.mark.parametrize("direction", [forward_spec, backward_spec])
def test_call_without_its_empty_leading_rows_equals_the_shorter_call(direction: Callable[..., Any]):
    whole = case("call", t=10, s=1, bias="bnts", **BOTTOM_RIGHT)
    left = case("call", t=1, s=1, bias="bnts", **BOTTOM_RIGHT)
    assert variants_of(direction(whole)) == variants_of(direction(left))


def test_leading_rows_without_keys_are_cut_off():
    trimmed = spec(t=320, s=192, **BOTTOM_RIGHT)
    assert leading_padding_rows(trimmed) == 128
    assert variants_of(trimmed)[0].seq_len_q == 192
    assert leading_padding_rows(spec(t=320, s=192, **CAUSAL)) == 0


SEGMENTS: dict[str, Any] = {"packed": Packed((((1, 1.0),),) * 2)}


MOD = trace("score_mod", lambda score, b, n, t, s: jnp.tanh(score), (), "float32").program
LOG_PAST = trace("score_mod", lambda x, b, n, t, s: x - jnp.log(t - s), (), "float32").program
BY_HEAD = trace("mask_mod", lambda b, n, t, s: s <= t + n, (), "float32").program


def paged_spec(**facts: Any) -> AttentionSpec:
    made = Case("paged", dtype="bfloat16", kv_lengths=(48, 1), inference=True, **facts)
    avals = jax.eval_shape(partial(in_pages, made), made.avals())
    return spec_of(paged_options(made, made.forward_options()), avals)


BREAKS_RULE: dict[str, Callable[[], AttentionSpec]] = {
    "may be NaN where the mask forbids": lambda: spec_with(spec(mask="11ts"), score_mod=LOG_PAST),
    "sinks beside a mask_mod": lambda: spec_with(spec(sinks=1), mask_mod=BY_HEAD),
    "gradient of what score_mod reads": lambda: spec_with(
        spec(), score_mod=MOD, gradients=("score_mod_0",)
    ),
    "an axis has length zero": lambda: spec(s=0),
    "heads wider than 2,048": lambda: spec(h=2049),
    "2^31 queries or keys": lambda: with_query_rows(spec(), 2**31),
    "kernels need max_segments": lambda: spec(**SEGMENTS),
    "packed sequences: cuDNN counts a bias": lambda: spec(**SEGMENTS, max_segments=1, mask="11ts"),
    "local_window_size as an array": lambda: spec(window_arrays=((2, 1),)),
    "causal_alignment as a number": lambda: spec(is_causal=True, offset=3),
    "cuDNN multiplies by it in float32": lambda: spec(scale=1e-40),
    "this version does not return the dropout mask": lambda: spec_with(
        spec(**SEGMENTS, max_segments=1, dropout=0.1), needs_keep=True
    ),
    "sinks: cuDNN has one": lambda: spec(sinks=2),
    "alibi_slopes: cuDNN has one": lambda: spec(alibi=2),
    "from the bottom right of lengths": lambda: spec(
        alibi=1, q_lengths=(1, 0.5), alignment="bottom_right"
    ),
    "the same for all keys": lambda: backward_spec(case("call", bias="11t1")),
    "dropout: cuDNN has one key": lambda: spec(dropout=0.1, dropout_keys=2),
    "the gradient of alibi_slopes": lambda: backward_spec(case("call", alibi=1)),
    "combine this bottom-right": lambda: spec(bias="11ts", q_lengths=(1, 0.5), **BOTTOM_RIGHT),
}
"""Part of each rule's reason, and a call that breaks only this rule."""


@pytest.mark.parametrize("part", BREAKS_RULE)
def test_each_rule_refuses_its_call(part: str):
    (reason,) = cudnn_rules.not_supported_reasons(BREAKS_RULE[part]())
    assert part in str(reason)


@pytest.mark.parametrize("lengths", [{}, {"kv_lengths": (1.0,)}], ids=str)
@pytest.mark.parametrize(("value_dim", "padded"), [(64, 80), (112, 128), (125, 128), (126, 144)])
def test_packed_offsets_fit_in_32_bits(value_dim: int, padded: int, lengths: dict[str, Any]):
    """The padded head dims count: the gradient of lse adds three columns."""
    facts = {"b": 1, "n": 16, "v": value_dim, "lse_grad": True, **lengths}
    limit = (2**31 - 1) // (16 * padded)
    for rows, is_refused in ((limit, False), (limit + 1, True)):
        calls = variants_of(with_query_rows(backward_spec(case("call", **facts)), rows))
        for call in calls:
            assert bool(cudnn_rules.variant_reason(call, "sm90")) == (is_refused and call.is_packed)
        assert {call.head_dim_v for call in calls if call.is_packed} == {padded}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"t": 4, "page": 16}, "unless each row has one query"),
        ({"t": 1, "page": 16, "window": (5, 0)}, "unless each row has one query"),
        ({"t": 1, "page": 16, "soft_cap": 2.0}, "unless each row has one query"),
        ({"t": 1, "page": 16, "sinks": 1}, "unless each row has one query"),
        ({"t": 1, "page": 24}, "needs a power of two"),
        ({"t": 1, "page": 16}, ""),
    ],
    ids=str,
)
def test_pages_that_cudnn_reads(facts: dict[str, Any], reason: str):
    (call,) = variants_of(paged_spec(s=48, alignment="bottom_right", **facts))
    found = cudnn_rules.variant_reason(call, "sm90")
    assert bool(found) == bool(reason) and reason in str(found or "")


@pytest.mark.parametrize(
    ("facts", "is_first"),
    [
        ({}, True), (BOTTOM_RIGHT, True), ({"q_lengths": (0, 1.0)}, True), ({"t": 2}, False),
        ({"window": (9, None)}, False), ({"bias": "11ts"}, False), ({"mask": "b11s"}, False),
        ({"soft_cap": 2.0}, False), ({"sinks": 1}, False), ({"alibi": 1}, False),
    ],
    ids=str,
)  # fmt: skip
def test_only_a_plain_single_query_is_tried_unpacked_first(facts: dict[str, Any], is_first: bool):
    """Other kernels multiply by what lies past a length, which must be cleared for them."""
    calls = variants_of(spec(**{"t": 1, "kv_lengths": (1.0, 0.5)} | facts))
    assert (calls[0].decodes, calls[0].is_packed) == (is_first, not is_first)
    assert any(call.decodes for call in calls) == is_first


def test_too_many_arrays_by_row_give_a_reason():
    """Integer arrays count, although cuDNN does not count them; arrays by head do not."""
    (call, *_) = variants_of(backward_spec(case("call")))
    mods = {"node_arrays": "f 1 8 1 1, i 2 1 256 1, f 1 1 256 1", "score_nodes": "f0 = tanh x"}
    reasons = {
        (arch, arrays): cudnn_rules.variant_reason(
            replace(call, **mods | {"node_arrays": mods["node_arrays"] + arrays}), arch
        )
        for arch in ("sm80", "sm90", "sm120")
        for arrays in ("", ", i 1 8 256 1")
    }
    assert not reasons["sm90", ""] and "need 3" in str(reasons["sm90", ", i 1 8 256 1"])
    for arch in ("sm80", "sm120"):
        assert "can read 0 arrays" in str(reasons[arch, ""])
    forward = replace(call, backward=False, **mods)
    assert not cudnn_rules.variant_reason(forward, "sm80")


def with_query_rows(spec: AttentionSpec, rows: int) -> AttentionSpec:
    shapes = {"query": (1, rows, *spec.shape("query")[2:])}
    operands = (replace(x, shape=shapes.get(x.name, x.shape)) for x in spec.operands)
    return AttentionSpec(spec.options, tuple(operands))


@pytest.mark.parametrize(("scale", "expected"), [(0.5, 0.5), (-0.5, 0.5), (0.0, 1.0)])
def test_cudnn_gets_positive_scales(scale: float, expected: float):
    for direction in (forward_spec, backward_spec):
        for call in variants_of(direction(case("call", scale=scale))):
            assert call.scale == expected


@pytest.mark.parametrize(
    ("dims", "expected"), [((256, 128), 256), ((200, 48), 208), ((192, 192), 192), ((64, 128), 128)]
)
def test_value_is_padded_to_wide_heads_in_the_backward_pass(dims: tuple[int, int], expected: int):
    """Only in the backward pass, where known_bad.cc refuses the unpadded call."""
    h, v = dims
    for direction in (forward_spec, backward_spec):
        calls = variants_of(direction(case("call", h=h, v=v)))
        packed = [call.head_dim_v for call in calls if call.is_packed]
        assert packed == ([v, expected] if calls[0].backward and expected > v else [v])
        dense = [call.head_dim_v for call in calls if not call.is_packed]
        assert dense == ([v, round_up(h, 8)] * 2 if len(packed) == 2 else [v, v])


def test_every_rule_has_a_call_that_breaks_it():
    rules = [x for x in cudnn_rules._RULES if x is not DTYPE]
    for rule in rules:
        assert sum(part in rule.text for part in BREAKS_RULE) == 1, rule.text
    assert len(rules) == len(BREAKS_RULE)


def test_every_broken_rule_gives_a_reason():
    reasons = cudnn_rules.not_supported_reasons(spec(dtype="float32", sinks=2, alibi=2))
    assert len(reasons) == 3 and str(reasons[-1]) == "needs float16 or bfloat16, got float32"


def test_backward_runs_some_calls_that_forward_refuses():
    assert cudnn_rules.not_supported_reasons(backward_spec(case("call", sinks=2))) == ()
    one_key = backward_spec(case("call", s=1, bias="11t1"))
    assert cudnn_rules.not_supported_reasons(one_key) == ()


def test_backward_needs_no_sinks():
    assert variants_of(spec(sinks=1))[0].has_sinks
    assert not variants_of(backward_spec(case("call", sinks=1)))[0].has_sinks


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_gradient_of_lse_as_extra_columns(dtype: str, size: float):
    rng = np.random.default_rng(0)
    grad = (size * rng.standard_normal((2, 3, 5))).astype(np.float32)
    out = jnp.zeros((2, 5, 3, 4), dtype)
    outs, grads = jax.jit(lse_grad.with_lse_grad)(out, out, jnp.zeros_like(grad), grad)
    assert outs.shape == (2, 5, 3, 4 + lse_grad.COLUMNS)
    columns = (np.asarray(x[..., 4:], np.float64) for x in (outs, grads))
    delta = np.prod(list(columns), axis=0).sum(axis=-1)
    # Exact to float32's precision, or to that of float16's smallest normal numbers.
    np.testing.assert_allclose(-delta.swapaxes(1, 2), grad, rtol=2**-22, atol=2.0**-28)


def test_no_gradient_of_lse_in_rows_without_keys():
    lse = jnp.full((1, 1, 2), -jnp.inf)
    out = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    _, grads = lse_grad.with_lse_grad(out, out, lse, jnp.full_like(lse, jnp.nan))
    assert not np.asarray(grads[..., 8:], np.float32).any()
