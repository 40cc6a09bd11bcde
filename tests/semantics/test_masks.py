"""The mask of a call, formed a few rows at a time, against a loop over all pairs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_dispatch.call.options import AttentionOptions
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.invalid_values import invalid_queries
from attn_dispatch.semantics.masks import allowed
from attn_dispatch.semantics.positions import Positions
from attn_dispatch.xla.blocks import Block
from attn_dispatch_tools.verify.reference import Operands, segment_ids
from attn_dispatch_tools.verify.reference import allowed as reference_allowed
from attn_dispatch_tools.verify.reference import invalid_queries as invalid_by_reference
from tests.support.option_parts import options_with, with_facts

BATCH = 2
OFFSETS = st.integers(-10, 10) | st.sampled_from([-(2**29), 2**29])


def mask_of(options: AttentionOptions, operands: Operands, start: int, size: int) -> np.ndarray:
    """The library's mask of some rows, bool [B, N, size, S]."""
    arrays = {name: jnp.asarray(x) for name, x in operands.items()}
    spec = AttentionSpec.of([arrays[name] for name in options.operands], options)
    with jax.numpy_rank_promotion("raise"):
        block = Block({"b": 0, "t": start}, {"b": spec.batch, "t": size})
        positions = Positions.of(spec, arrays).part(block.take)
        mask = allowed(spec, arrays, positions)
    shape = (spec.batch, spec.num_heads, size, spec.seq_len_kv)
    return np.broadcast_to(True if mask is None else np.asarray(mask), shape)


def invalid_of(options: AttentionOptions, operands: Operands) -> np.ndarray:
    """bool [B, T]: the queries whose results the library sets to NaN."""
    arrays = {name: jnp.asarray(x) for name, x in operands.items()}
    spec = AttentionSpec.of([arrays[name] for name in options.operands], options)
    with jax.numpy_rank_promotion("raise"):
        invalid = invalid_queries(spec, arrays)
    return np.broadcast_to(
        False if invalid is None else np.asarray(invalid), (BATCH, spec.seq_len_q)
    )


def looped_mask(options: AttentionOptions, query_ids: list[int], key_ids: list[int]) -> np.ndarray:
    """The mask [T, S] (True = query i attends to key j) of one batch row, by a loop over pairs."""
    mask = np.zeros((len(query_ids), len(key_ids)), bool)
    for segment in set(query_ids) - {0}:
        queries = [i for i, x in enumerate(query_ids) if x == segment]
        keys = [j for j, x in enumerate(key_ids) if x == segment]
        is_bottom_right = options.meaning.causal_alignment == "bottom_right"
        offset = len(keys) - len(queries) if is_bottom_right else options.meaning.causal_offset
        left, right = options.meaning.window
        for i, row in enumerate(queries):
            for j, column in enumerate(keys):
                mask[row, column] = (
                    (not options.meaning.is_causal or j <= i + offset)
                    and (left is None or j >= i + offset - left)
                    and (right is None or j <= i + offset + right)
                )
    return mask


def example(t: int, s: int, **more: Any) -> Operands:
    shapes = {"query": (BATCH, t, 2, 1), "key": (BATCH, s, 1, 1), "value": (BATCH, s, 1, 1)}
    operands = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return operands | {x: np.array(y, np.int32) for x, y in more.items() if y is not None}


@st.composite
def calls(draw) -> tuple[AttentionOptions, Operands]:
    """A call with any lengths, segments, window and alignment, invalid ones included."""
    # Two shapes only, so that few programs are compiled.
    t, s = draw(st.sampled_from([(5, 8), (8, 5)]))

    def lengths(limit: int) -> Any:
        return draw(
            st.none() | st.lists(st.integers(-1, limit + 1), min_size=BATCH, max_size=BATCH)
        )

    def packed(length: int) -> list[list[int]]:
        is_ordered = draw(st.booleans())
        rows = []
        for _ in range(BATCH):
            ids = draw(st.lists(st.integers(-1, 4), min_size=length, max_size=length))
            padding = draw(st.sets(st.integers(0, length - 1)))
            ids = sorted(ids) if is_ordered else ids
            rows.append([0 if i in padding else x for i, x in enumerate(ids)])
        return rows

    has_segments = draw(st.booleans())
    operands = example(
        t,
        s,
        query_seq_lengths=lengths(t),
        key_value_seq_lengths=lengths(s),
        query_segment_ids=packed(t) if has_segments else None,
        key_value_segment_ids=packed(s) if has_segments else None,
    )
    side = st.none() | st.integers(0, 5)
    window = (draw(side), draw(side))
    is_array = draw(st.booleans())
    if is_array:
        sides = st.integers(-1, 5) | st.just(2**31 - 1)
        rows = draw(st.sampled_from([1, BATCH]))
        pair = st.lists(sides, min_size=2, max_size=2)
        operands["window"] = np.array(draw(st.lists(pair, min_size=rows, max_size=rows)), np.int32)
    alignment = draw(st.sampled_from(["top_left", "bottom_right", "by_offset", "by_offset"]))
    offset = 0
    if alignment == "by_offset" and draw(st.booleans()):
        offset = draw(OFFSETS)
    elif alignment == "by_offset":
        rows = draw(st.sampled_from([1, BATCH]))
        found = draw(st.lists(OFFSETS, min_size=rows, max_size=rows))
        operands["causal_offset"] = np.array(found, np.int32)
    largest = draw(st.none() | st.integers(1, 4)) if has_segments else None
    longest = draw(st.none() | st.tuples(st.integers(1, 6), st.integers(1, 6)))
    options = options_with(
        operands=tuple(operands),
        scale=1.0,
        is_causal=draw(st.booleans()),
        causal_alignment=alignment,
        causal_offset=offset,
        window=(None, None) if is_array else window,
        max_segments=largest,
        max_seq_lens=longest if largest else None,
    )
    return options, operands


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(calls(), st.data())
def test_drawn_lengths_segments_and_windows_agree_with_loops(call, data):
    options, operands = call
    t = operands["query"].shape[1]
    size = data.draw(st.sampled_from([2, t]))
    start = data.draw(st.integers(0, t - size))
    mask = mask_of(options, operands, start, size)
    invalid = np.array([invalid_by_reference(options, operands, row) for row in range(BATCH)])
    np.testing.assert_array_equal(invalid_of(options, operands), invalid)
    for batch_row in range(BATCH):
        query_ids, key_ids = (x.tolist() for x in segment_ids(options, operands, batch_row))
        window = options.meaning.window
        if "window" in operands:
            window = operands["window"][batch_row if len(operands["window"]) > 1 else 0].tolist()
        facts: dict[str, Any] = {"window": tuple(window)}
        if "causal_offset" in operands:
            offsets = operands["causal_offset"]
            facts["causal_offset"] = int(offsets[batch_row if len(offsets) > 1 else 0])
        expected = looped_mask(with_facts(options, **facts), query_ids, key_ids)
        for head in range(2):
            np.testing.assert_array_equal(mask[batch_row, head], expected[start : start + size])
    # The dense reference, against which results are tested, has to agree as well.
    reference_mask = reference_allowed(options, operands)
    np.testing.assert_array_equal(mask, reference_mask[:, :, start : start + size])


def drawing(options: AttentionOptions, operands: Operands) -> list[str]:
    """The mask of the first batch row and head as rows of 'x' and '.'."""
    t = operands["query"].shape[1]
    return ["".join(".x"[int(x)] for x in row) for row in mask_of(options, operands, 0, t)[0, 0]]


def options_of(operands: Operands, **more: Any) -> AttentionOptions:
    return options_with(operands=tuple(operands), scale=1.0, **more)


def test_unmasked_call_forms_no_positions_and_no_mask():
    operands = {name: jnp.asarray(x) for name, x in example(3, 4).items()}
    options = options_of(example(3, 4), causal_alignment="bottom_right")
    spec = AttentionSpec.of(list(operands.values()), options)
    positions = Positions.of(spec, operands)
    assert positions == Positions(None, None, None, None)
    assert allowed(spec, operands, positions) is None


@pytest.mark.parametrize(
    ("alignment", "expected"),
    [("top_left", ["x....", "xx...", "xxx.."]), ("bottom_right", ["xxx..", "xxxx.", "xxxxx"])],
)
def test_causal_mask_follows_the_alignment(alignment, expected):
    operands = example(3, 5)
    options = options_of(operands, is_causal=True, causal_alignment=alignment)
    assert drawing(options, operands) == expected


def test_bottom_right_alignment_uses_the_actual_lengths():
    operands = example(3, 5, query_seq_lengths=(2, 3), key_value_seq_lengths=(4, 5))
    options = options_of(operands, is_causal=True, causal_alignment="bottom_right")
    assert drawing(options, operands) == ["xxx..", "xxxx.", "....."]


def test_window_moves_with_the_alignment_even_without_causality():
    operands = example(3, 5)
    options = options_of(operands, window=(1, 0), causal_alignment="bottom_right")
    assert drawing(options, operands) == [".xx..", "..xx.", "...xx"]


def test_positions_are_counted_inside_segments():
    query_ids, key_ids = [[1, 1, 2, 2, 0]] * 2, [[1, 0, 2, 2, 2]] * 2
    operands = example(5, 5, query_segment_ids=query_ids, key_value_segment_ids=key_ids)
    options = options_of(operands, is_causal=True, causal_alignment="bottom_right")
    # One key for two queries in segment 1; three keys for two queries in segment 2.
    assert drawing(options, operands) == [".....", "x....", "..xx.", "..xxx", "....."]


def invalid_drawing(options: AttentionOptions, operands: Operands) -> str:
    """Which queries of the first batch row are invalid, as 'x' and '.'."""
    return "".join(".x"[int(x)] for x in invalid_of(options, operands)[0])


def test_segment_ids_may_stand_in_any_order():
    ids = {"query_segment_ids": [[3, 1, 3, 4]] * 2, "key_value_segment_ids": [[3, 0, 4, 3]] * 2}
    operands = example(4, 4, **ids)
    options = options_of(operands)
    assert drawing(options, operands) == ["x..x", "....", "x..x", "..x."]
    assert invalid_drawing(options, operands) == "...."
    causal = with_facts(options, is_causal=True)
    assert drawing(causal, operands) == ["x...", "....", "x..x", "..x."]


def test_with_max_segments_an_id_out_of_order_is_invalid_everywhere():
    ids = {"query_segment_ids": [[3, 1, 3, 4]] * 2, "key_value_segment_ids": [[1, 3, 3, 4]] * 2}
    operands = example(4, 4, **ids)
    options = options_of(operands, max_segments=4)
    assert drawing(options, operands) == ["....", "....", "....", "...x"]
    assert invalid_drawing(options, operands) == "xxx."
    ids["query_segment_ids"] = [[1, 3, 3, 4]] * 2
    operands = example(4, 4, **ids) | {"key_value_segment_ids": np.array([[1, 4, 3, 0]] * 2)}
    assert drawing(options, operands) == ["x...", "....", "....", ".x.."]
    assert invalid_drawing(options, operands) == ".xx."


def test_ids_above_max_segments_are_invalid():
    ids = {"query_segment_ids": [[1, 9, 2]] * 2, "key_value_segment_ids": [[9, 1, 2, 3]] * 2}
    operands = example(3, 4, **ids)
    options = options_of(operands, max_segments=2)
    assert drawing(options, operands) == [".x..", "....", "..x."]
    assert invalid_drawing(options, operands) == ".x."


@pytest.mark.parametrize("limit", [None, 4])
def test_negative_ids_are_invalid_and_0_is_padding(limit):
    ids = {"query_segment_ids": [[-1, 1, 1, 0]] * 2, "key_value_segment_ids": [[-1, -1, 1, 1]] * 2}
    operands = example(4, 4, **ids)
    options = options_of(operands, is_causal=True, max_segments=limit)
    assert drawing(options, operands) == ["....", "..x.", "..xx", "...."]
    assert invalid_drawing(options, operands) == "x..."


def test_ids_past_a_length_are_ignored_and_a_length_past_the_array_is_invalid():
    ids = {"query_segment_ids": [[1, 1, -1]] * 2, "key_value_segment_ids": [[1, 1, 1]] * 2}
    for lengths, expected in (((2, 2), "..."), ((3, 2), "..x"), ((4, 2), "xxx"), ((-1, 2), "xxx")):
        operands = example(3, 3, **ids, query_seq_lengths=lengths)
        assert invalid_drawing(options_of(operands, max_segments=2), operands) == expected
        operands = example(3, 3, key_value_seq_lengths=lengths)
        expected = expected if "." not in expected else "..."
        assert invalid_drawing(options_of(operands), operands) == expected


def test_segment_above_max_seq_lens_is_invalid():
    ids = {"query_segment_ids": [[1, 2, 2, 3]] * 2, "key_value_segment_ids": [[1, 2, 3, 3]] * 2}
    operands = example(4, 4, **ids)
    for longest, expected in (
        ((2, 2), "...."),
        ((1, 2), ".xx."),
        ((2, 1), "...x"),
        ((1, 1), ".xxx"),
    ):
        options = options_of(operands, max_segments=3, max_seq_lens=longest)
        assert invalid_drawing(options, operands) == expected
