"""SequenceRanges: the ranges that kernels receive, however the caller describes sequences."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.semantics.packing import SequenceRanges
from tests.support.option_parts import options_with

B, T, S = 2, 9, 12
SHAPES = {"query": (B, T, 2, 8), "key": (B, S, 2, 8), "value": (B, S, 2, 8)}
FIELDS = ("starts_q", "lengths_q", "starts_kv", "lengths_kv")


def ranges_of(more: dict[str, Any], **options: Any) -> SequenceRanges:
    """The ranges of a call, computed under jit."""
    arrays = {x: jnp.asarray(y, jnp.int32) for x, y in more.items()}
    avals = {x: jax.ShapeDtypeStruct(y, jnp.bfloat16) for x, y in SHAPES.items()} | arrays
    call = options_with(operands=tuple(avals), scale=1.0, **options)
    with jax.numpy_rank_promotion("raise"):
        ranges = SequenceRanges(**_compute(AttentionSpec.of(list(avals.values()), call), arrays))
    check_invariants(ranges)
    return ranges


@partial(jax.jit, static_argnums=0)
def _compute(spec: AttentionSpec, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    ranges = SequenceRanges.of(spec, arrays)
    return {field.name: getattr(ranges, field.name) for field in fields(ranges)}


def check_invariants(ranges: SequenceRanges) -> None:
    """Ranges lie inside the arrays, do not overlap, and agree with each position's sequence."""
    for starts, lengths, sequence_of, real, length in (
        (ranges.starts_q, ranges.lengths_q, ranges.sequence_of_query, ranges.real_queries, T),
        (ranges.starts_kv, ranges.lengths_kv, ranges.sequence_of_key, ranges.real_keys, S),
    ):
        assert starts.shape == lengths.shape and sequence_of.shape == (B, length) == real.shape
        assert {x.dtype for x in (starts, lengths, sequence_of)} == {jnp.dtype("int32")}
        ends = np.asarray(starts + lengths)
        assert (np.asarray(starts) >= 0).all() and (np.asarray(lengths) >= 0).all()
        assert (ends <= length).all() and (ends[:, :-1] <= np.asarray(starts)[:, 1:]).all()
        expected = np.zeros((B, length), int)
        for b, m in np.ndindex(*starts.shape):
            expected[b, starts[b, m] : ends[b, m]] = m + 1
        np.testing.assert_array_equal(sequence_of, expected)
        np.testing.assert_array_equal(real, expected > 0)


def as_lists(ranges: SequenceRanges) -> dict[str, Any]:
    return {x: np.asarray(getattr(ranges, x)).tolist() for x in FIELDS}


def test_ranges_from_cu_seqlens():
    ranges = ranges_of(
        {
            "cu_seqlens_q": [[0, 3, 3, 8], [0, 0, 5, 9]],
            "cu_seqlens_kv": [[0, 4, 12, 12], [0, 1, 2, 3]],
        }
    )
    assert as_lists(ranges) == {
        "starts_q": [[0, 3, 3], [0, 0, 5]], "lengths_q": [[3, 0, 5], [0, 5, 4]],
        "starts_kv": [[0, 4, 12], [0, 1, 2]], "lengths_kv": [[4, 8, 0], [1, 1, 1]],
    }  # fmt: skip


def test_sequence_above_max_seq_lens_gets_length_0():
    ranges = ranges_of(
        {"cu_seqlens_q": [[0, 3, 9]] * B, "cu_seqlens_kv": [[0, 5, 12], [0, 8, 12]]},
        max_seq_lens=(5, 7),
    )
    assert as_lists(ranges)["lengths_q"] == [[3, 0], [0, 0]]
    assert as_lists(ranges)["lengths_kv"] == [[5, 0], [0, 0]]
    ids = {
        "query_segment_ids": [[1, 1, 2, 2, 2, 3, 3, 0, 0]] * B,
        "key_value_segment_ids": [[1] + [2] * 3 + [3] * 8] * B,
    }
    ranges = ranges_of(ids, max_segments=3, max_seq_lens=(2, 8))
    assert as_lists(ranges)["lengths_q"][0] == [2, 0, 2]
    assert as_lists(ranges)["lengths_kv"][0] == [1, 0, 8]


def test_ranges_from_segment_ids():
    ids = {
        "query_segment_ids": [[0, 1, 1, 0, 0, 3, 3, 3, 0], [1, 1, 1, 2, 2, 2, 4, 4, 4]],
        "key_value_segment_ids": [[2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 0, 0], [0] * 12],
    }
    assert as_lists(ranges_of(ids, max_segments=4)) == {
        "starts_q": [[1, 5, 5, 9], [0, 3, 6, 6]], "lengths_q": [[2, 0, 3, 0], [3, 3, 0, 3]],
        "starts_kv": [[0, 0, 3, 7], [12, 12, 12, 12]], "lengths_kv": [[0, 3, 4, 3], [0, 0, 0, 0]],
    }  # fmt: skip
    # Ids above max_segments have no range, nor do positions past a length.
    ranges = ranges_of(ids | {"query_seq_lengths": [7, 5]}, max_segments=3)
    assert as_lists(ranges)["lengths_q"] == [[2, 0, 2], [3, 2, 0]]
    assert as_lists(ranges)["lengths_kv"] == [[0, 3, 4], [0, 0, 0]]


def test_ranges_from_lengths():
    ranges = ranges_of({"query_seq_lengths": [4, 0]})
    assert as_lists(ranges) == {
        "starts_q": [[0], [0]], "lengths_q": [[4], [0]],
        "starts_kv": [[0], [0]], "lengths_kv": [[12], [12]],
    }  # fmt: skip
    # A row with a wrong length gets ranges of length 0.
    assert as_lists(ranges_of({"key_value_seq_lengths": [99, 5]})) == {
        "starts_q": [[0], [0]], "lengths_q": [[0], [T]],
        "starts_kv": [[0], [0]], "lengths_kv": [[0], [5]],
    }  # fmt: skip
    assert as_lists(ranges_of({}))["lengths_q"] == [[T], [T]]


def test_segment_ids_without_max_segments_raise():
    with pytest.raises(ValueError, match="expected max_segments with segment ids, got None"):
        ranges_of({"query_segment_ids": [[1] * T] * B, "key_value_segment_ids": [[1] * S] * B})


def rows(length: int, low: int, high: int) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(low, high), min_size=length, max_size=length)
    return st.lists(row, min_size=B, max_size=B)


_limits = st.lists(st.integers(-2, 15), min_size=B, max_size=B)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(rows(T, -2, 6), rows(S, -2, 6), _limits)
def test_ranges_of_arbitrary_ids_keep_the_invariants(query_ids, key_ids, lengths):
    ids = {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}
    ranges_of(ids | {"key_value_seq_lengths": lengths}, max_segments=4)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(rows(4, -3, 20), rows(4, -3, 20))
def test_ranges_of_arbitrary_cu_seqlens_keep_the_invariants(cu_q, cu_kv):
    ranges_of({"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}, max_seq_lens=(6, 20))


def test_no_intermediate_has_two_long_axes():
    length, sequences = 2**15, 512
    shape = jax.ShapeDtypeStruct((1, length), jnp.int32)
    qkv = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.bfloat16)
    operands = dict.fromkeys(("query", "key", "value"), qkv)
    operands |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), shape)
    options = options_with(operands=tuple(operands), scale=1.0, max_segments=sequences)
    spec = AttentionSpec.of(list(operands.values()), options)

    def compute(ids):
        ranges = SequenceRanges.of(spec, {x: ids for x in operands if x.endswith("_ids")})
        return ranges.starts_q, ranges.lengths_kv, ranges.real_queries

    memory = jax.jit(compute).lower(shape).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 128 * length
