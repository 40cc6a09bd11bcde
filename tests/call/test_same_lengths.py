"""`same_lengths`: both sides get one object, or equal numbers that the host knows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import explain
from attn_dispatch.inspection import spec_of
from tests.support.backend import needs_cudnn

Q = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16)
LONGER = jax.ShapeDtypeStruct((2, 12, 4, 16), jnp.bfloat16)
LENGTHS, OTHERS = np.array([3, 8]), np.array([3, 7])
IDS = np.ones((2, 8), np.int32)
STRUCT = jax.ShapeDtypeStruct((2,), jnp.int32)


def lengths(queries: Any, keys: Any) -> dict[str, Any]:
    return {"query_seq_lengths": queries, "key_value_seq_lengths": keys}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        (lengths(LENGTHS, LENGTHS), True),
        (lengths(LENGTHS, OTHERS), False),
        (lengths(LENGTHS, LENGTHS.copy()), True),
        (lengths(LENGTHS, LENGTHS.astype(np.uint8)), True),
        (lengths([3, 8], [3, 8]), True),
        (lengths([3, 8], LENGTHS), True),
        (lengths([3, 8], [3, 7]), False),
        (lengths(LENGTHS, None), False),
        (lengths(LENGTHS, jnp.asarray(LENGTHS)), False),
        (lengths(jnp.asarray(LENGTHS), jnp.asarray(LENGTHS)), False),
        (lengths(LENGTHS, STRUCT), False),
        (lengths(STRUCT, STRUCT), True),
        (lengths(STRUCT, jax.ShapeDtypeStruct((2,), jnp.int32)), False),
        ({"query_segment_ids": IDS, "max_segments": 1}, True),
        ({"key_value_segment_ids": IDS, "max_segments": 1}, True),
        ({"query_segment_ids": IDS, "key_value_segment_ids": IDS}, True),
        ({"query_segment_ids": IDS, "key_value_segment_ids": IDS.copy()}, True),
        ({"query_segment_ids": IDS, "key_value_segment_ids": IDS + 1}, False),
        ({"query_segment_ids": IDS, **lengths(LENGTHS, LENGTHS)}, True),
        ({"query_segment_ids": IDS, **lengths(LENGTHS, OTHERS)}, False),
    ],
)
def test_same_lengths_where_both_sides_are_known_to_agree(given: dict[str, Any], expected: bool):
    assert spec_of(query=Q, key=Q, value=Q, **given).meaning.same_lengths is expected


def test_no_same_lengths_where_queries_and_keys_differ_in_length():
    given = lengths(LENGTHS, LENGTHS)
    assert not spec_of(query=Q, key=LONGER, value=LONGER, **given).meaning.same_lengths


@needs_cudnn
def test_equal_copy_of_the_lengths_needs_no_mask():
    """cuDNN has no bottom-right mask beside a bias, but with equal lengths it is the top-left one.

    Different lengths need a mask: the test would notice if no call needed one.
    """
    bias = jax.ShapeDtypeStruct((2, 4, 8, 8), jnp.bfloat16)
    rewrites: list[tuple[str, ...]] = []
    for keys in (LENGTHS, LENGTHS.copy(), OTHERS):
        explanation = explain(
            Q, Q, Q, bias, is_causal=True, causal_alignment="bottom_right", target="sm90",
            **lengths(LENGTHS, keys),
        )  # fmt: skip
        assert explanation.chosen_forward == explanation.chosen_backward == "cudnn"
        assert explanation.forward[0].rewrites == explanation.backward[0].rewrites
        rewrites.append(explanation.forward[0].rewrites)
    assert rewrites == [(), (), ("causality and window: as a mask",)]


def test_same_lengths_under_jit():
    """Inside jit, an array passed for both sides is one tracer."""
    found: list[bool] = []

    @jax.jit
    def traced(queries: jax.Array, keys: jax.Array) -> None:
        for given in (lengths(queries, queries), lengths(queries, keys)):
            found.append(spec_of(query=Q, key=Q, value=Q, **given).meaning.same_lengths)

    traced(jnp.asarray(LENGTHS), jnp.asarray(LENGTHS))
    assert found == [True, False]
