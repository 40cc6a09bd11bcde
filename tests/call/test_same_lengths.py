"""`same_lengths` is true where the caller passes one object as the lengths of both sides."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.inspection import spec_of

Q = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16)
LONGER = jax.ShapeDtypeStruct((2, 12, 4, 16), jnp.bfloat16)
LENGTHS, OTHERS = np.array([3, 8]), np.array([3, 8])
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
        (lengths(LENGTHS, None), False),
        (lengths(STRUCT, STRUCT), True),
        (lengths(STRUCT, jax.ShapeDtypeStruct((2,), jnp.int32)), False),
        ({"query_segment_ids": IDS, "max_segments": 1}, True),
        ({"key_value_segment_ids": IDS, "max_segments": 1}, True),
        ({"query_segment_ids": IDS, "key_value_segment_ids": IDS}, True),
        ({"query_segment_ids": IDS, "key_value_segment_ids": IDS.copy()}, False),
        ({"query_segment_ids": IDS, **lengths(LENGTHS, LENGTHS)}, True),
        ({"query_segment_ids": IDS, **lengths(LENGTHS, OTHERS)}, False),
    ],
)
def test_same_lengths_where_one_array_serves_both_sides(given: dict[str, Any], expected: bool):
    assert spec_of(query=Q, key=Q, value=Q, **given).meaning.same_lengths is expected


def test_no_same_lengths_where_queries_and_keys_differ_in_length():
    given = lengths(LENGTHS, LENGTHS)
    assert not spec_of(query=Q, key=LONGER, value=LONGER, **given).meaning.same_lengths


def test_same_lengths_under_jit():
    """Inside jit, an array passed for both sides is one tracer."""
    found: list[bool] = []

    @jax.jit
    def traced(queries: jax.Array, keys: jax.Array) -> None:
        for given in (lengths(queries, queries), lengths(queries, keys)):
            found.append(spec_of(query=Q, key=Q, value=Q, **given).meaning.same_lengths)

    traced(jnp.asarray(LENGTHS), jnp.asarray(LENGTHS))
    assert found == [True, False]
