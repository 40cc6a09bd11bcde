"""Plans of masks: their limits, and the part of a call that they depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.interval_plan import (
    PlanTiles,
    lists_bytes,
    not_supported_reasons,
)
from attn_dispatch.semantics.mask_spec import mask_operands, mask_spec
from attn_dispatch.semantics.tile_lists import TileSizes
from tests.support.interval_calls import MODS, Draw, IntervalCall
from tests.support.option_parts import options_with, spec_with

TILES = PlanTiles(TileSizes(128, 128), TileSizes(128, 64))
MILLION = 2**20


def spec_of(tokens: int, ids: bool = False, **facts: Any) -> AttentionSpec:
    array = jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.bfloat16)
    given = {"query": array, "key": array, "value": array}
    if ids:
        struct = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        given |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), struct)
        facts |= {"max_segments": 4096, "same_lengths": True}
    return AttentionSpec.of(list(given.values()), options_with(given, **facts))


def test_lists_of_a_million_tokens():
    documents = spec_of(MILLION, ids=True, is_causal=True, max_seq_lens=(8192, 8192))
    assert not_supported_reasons(documents, TILES) == ()
    assert sum(lists_bytes(documents, TILES)) <= 64 * 10**6
    window = spec_of(MILLION, is_causal=True, window=(4095, None))
    assert not_supported_reasons(window, TILES) == ()
    assert sum(lists_bytes(window, TILES)) <= 64 * 10**6


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        (spec_of(MILLION, is_causal=True), "pass a window that holds the mask"),
        (spec_of(MILLION, ids=True), "pass max_segment_len, the length of the longest sequence"),
    ],
)
def test_lists_that_are_too_large_are_refused_with_their_size(spec, remedy):
    (reason,) = not_supported_reasons(spec, TILES)
    assert reason.rule == "mask/lists_bytes"
    assert dict(reason.facts) == {"bytes": lists_bytes(spec, TILES)[0]}
    assert reason.remedy.startswith(remedy)


def test_a_quarter_of_a_million_tokens_needs_no_band():
    assert not_supported_reasons(spec_of(MILLION // 4, is_causal=True), TILES) == ()


def test_reasons_of_masks_are_reasons_of_plans():
    call = IntervalCall("plain", 9, 12)
    spec = call.spec(call.draw(Draw(0)) | {"query": np.zeros((2, 0, 2, 1), np.float32)})
    assert [x.rule for x in not_supported_reasons(spec, TILES)] == ["empty"]


def test_calls_with_one_mask_have_one_spec_of_it():
    call = IntervalCall("cu", 9, 12, {"is_causal": True}, "prefix")
    arrays = call.draw(Draw(0))
    spec = call.spec(arrays)
    assert mask_operands(spec) == ("cu_seqlens_q", "cu_seqlens_kv", "mask_mod_0", "mods_start")
    backward = spec.in_training(("query",))[1]
    wider = arrays | {"query": np.zeros((2, 9, 2, 8), np.float16)}
    others = [backward, spec_with(spec, scale=0.5), call.spec(wider), mask_spec(spec)]
    assert {mask_spec(x) for x in others} == {mask_spec(spec)}
    masked = call.spec(arrays | {"mask": np.ones((1, 1, 9, 12), bool)})
    assert "mask" in mask_operands(masked)
    different = [
        masked,
        spec_with(spec, is_causal=False),
        spec_with(spec, window=(2, None)),
        replace(call, mod="").spec({x: y for x, y in arrays.items() if "mod" not in x}),
        spec_with(spec, max_seq_lens=(3, 3)),
    ]
    assert mask_spec(spec) not in {mask_spec(x) for x in different}
    assert "prefix" in MODS
