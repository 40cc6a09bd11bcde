"""The form in which kernels read a mask, and the masks that have none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.reason import rules_of
from attn_dispatch.semantics import intervals, mask_bits, mask_data
from attn_dispatch.semantics.interval_plan import PlanTiles, lists_bytes
from attn_dispatch.semantics.intervals import has_intervals
from attn_dispatch.semantics.tile_lists import TileSizes
from tests.support import bits
from tests.support.interval_calls import BATCH, HEADS, MODS, Arrays, Draw, IntervalCall, dense
from tests.support.option_parts import options_with

BY_ROWS = (
    IntervalCall("plain", 9, 12, {"is_causal": True}),
    IntervalCall("lengths", 9, 12, mod="window and sinks"),
    IntervalCall("segments", 9, 12, {"max_segments": 4}),
    IntervalCall("cu", 9, 12),
)
BY_BITS = (
    IntervalCall("ids", 9, 12),
    IntervalCall("plain", 9, 12, mod="product"),
    IntervalCall("plain", 9, 12, mod="three ranges"),
    IntervalCall("plain", 9, 12, mod="image groups"),
)


def on_device(arrays: Arrays) -> dict[str, Any]:
    return {x: jnp.asarray(y) for x, y in arrays.items()}


@pytest.mark.parametrize("call", BY_ROWS, ids=str)
def test_masks_that_are_intervals_are_rows(call: IntervalCall):
    arrays = call.draw(Draw(0))
    spec = call.spec(arrays)
    found = mask_data.mask_data(spec, on_device(arrays))
    assert has_intervals(spec) and not mask_data.has_bits(found)
    np.testing.assert_array_equal(found, intervals.rows(spec, on_device(arrays)))
    assert mask_data.data_bytes(spec) == 16 * BATCH * 9
    expected = np.asarray(dense(found, 12).any(axis=2))[:, None]
    np.testing.assert_array_equal(mask_data.attends(found), expected)
    # A dense mask, whatever it is, has no rows.
    masked = call.spec(arrays | {"mask": np.ones((1, 1, 9, 12), bool)})
    assert not has_intervals(masked)


@pytest.mark.parametrize("call", BY_BITS, ids=str)
def test_all_others_are_bits(call: IntervalCall):
    arrays = call.draw(Draw(0))
    spec = call.spec(arrays)
    found = mask_data.mask_data(spec, on_device(arrays))
    assert not has_intervals(spec) and mask_data.has_bits(found)
    assert mask_data.data_bytes(spec) == found.nbytes
    expected = bits.dense(np.asarray(found), 12).any(axis=3)
    np.testing.assert_array_equal(mask_data.attends(found), expected)


def test_lists_of_bits_are_counted_for_each_head():
    call, tiles = IntervalCall("plain", 9, 12), PlanTiles(TileSizes(4, 3), TileSizes(4, 3))
    arrays = call.draw(Draw(0))
    one, all_heads = (
        lists_bytes(call.spec(arrays | {"mask": np.ones((1, x, 9, 12), bool)}), tiles)
        for x in (1, HEADS)
    )
    assert all_heads == (HEADS * one[0], HEADS * one[1])


def refused(call: IntervalCall, arrays: Arrays, **changed: Any) -> frozenset[str]:
    return rules_of(mask_data.not_supported_reasons(call.spec(arrays | changed)))


def long(tokens: int) -> dict[str, np.ndarray]:
    return {x: np.broadcast_to(np.float32(0), (1, tokens, 1, 1)) for x in ("query", "key", "value")}


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (IntervalCall("plain", 9, 12, mod="product"), "compare s with numbers of the query"),
        (IntervalCall("ids", 9, 12), "pass max_segments"),
        (IntervalCall("plain", 9, 12), "describe the mask by a mask_mod"),
    ],
    ids=str,
)
def test_more_bits_than_the_limit_are_refused_with_a_remedy(call: IntervalCall, remedy: str):
    for tokens, is_refused in ((2**17, False), (2**17 + 1, True)):
        arrays = call.draw(Draw(0)) | long(tokens)
        for name in ("query_segment_ids", "key_value_segment_ids"):
            if name in arrays:
                arrays[name] = np.broadcast_to(np.int32(1), (1, tokens))
        if not call.mod and call.layout == "plain":
            arrays["mask"] = np.broadcast_to(np.True_, (1, 1, tokens, tokens))
        spec = call.spec(arrays)
        found = mask_data.not_supported_reasons(spec)
        assert [x.rule for x in found] == is_refused * ["mask/bits_bytes"]
        for reason in found:
            assert f"{mask_bits.bits_bytes(spec):,} bytes" in str(reason)
            assert reason.remedy.startswith(remedy)


def test_places_are_counted_in_32_bits():
    def rules(length: int, **facts: int) -> list[str]:
        spec = spec_of_ids(length, **facts)
        return [x.rule for x in mask_data.not_supported_reasons(spec)]

    most = 2**31 - 1025
    assert rules(most, max_segments=8) == []
    assert rules(most + 1, max_segments=8) == ["mask/length"]
    assert rules(64, max_segments=most // 12 - 1) == []
    assert rules(64, max_segments=most // 12) == ["mask/segments"]


def spec_of_ids(length: int, **facts: int) -> AttentionSpec:
    """Two batch rows with segment ids."""
    rows = {
        x: jax.ShapeDtypeStruct((2, length, 1, 8), jnp.bfloat16) for x in ("query", "key", "value")
    }
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    given = rows | {"query_segment_ids": ids, "key_value_segment_ids": ids}
    return AttentionSpec.of(list(given.values()), options_with(given, **facts))


def test_refused_calls_are_reasons(monkeypatch):
    call = IntervalCall("plain", 9, 12)
    arrays = call.draw(Draw(0))
    assert refused(call, arrays) == frozenset()
    assert refused(call, arrays, mask=np.ones((1, 1, 9, 12), bool)) == frozenset()
    assert refused(call, arrays, query=np.zeros((BATCH, 0, 2, 1), np.float32)) == {"empty"}
    monkeypatch.setitem(MODS, "by head", (lambda b, n, t, s: s <= t + n, ()))
    by_head = IntervalCall("plain", 9, 12, mod="by head")
    assert refused(by_head, by_head.draw(Draw(0))) == frozenset()
