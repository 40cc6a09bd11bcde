"""Ready-made score_mods against their definitions: soft_cap, alibi and relative_position."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, mods
from tests.support.ready_made_mods import (
    KEY,
    SLOPES,
    TABLE,
    Q,
    V,
    assert_same,
    by_definition,
    s,
    t,
)


def test_soft_cap_agrees_with_its_definition():
    assert_same(
        lambda q, k, v: dot_product_attention(q, k, v, score_mod=mods.soft_cap(1.5)),
        lambda q, k, v: by_definition(q, k, v, lambda x: 1.5 * jnp.tanh(x / 1.5)),
        Q, KEY, V,
    )  # fmt: skip
    cap = dot_product_attention(Q, KEY, V, score_mod=mods.soft_cap(2))
    np.testing.assert_allclose(cap, dot_product_attention(Q, KEY, V, logits_soft_cap=2), atol=1e-6)


def test_alibi_agrees_with_its_definition():
    assert_same(
        lambda q, k, v, slopes: dot_product_attention(q, k, v, score_mod=mods.alibi(slopes)),
        lambda q, k, v, slopes: by_definition(
            q, k, v, lambda x: x - slopes[:, None, None] * np.abs(t - s)
        ),
        Q, KEY, V, SLOPES,
    )  # fmt: skip


def test_alibi_keeps_long_distances_in_16_bits():
    slopes = jnp.ones(1, jnp.bfloat16)
    score = mods.alibi(slopes)(jnp.float32(0), 0, 0, jnp.int32(0), jnp.int32(1001))
    assert score == -1001


# First distance of each bucket by hand: half hold one distance each, the others begin at the whole
# number that is not below exact · (max_distance / exact)^(i / wide).
# 32, both directions: 16 each, 8 exact, 8 · 16^(i/8) = 8, 11.3, 16, 22.6, 32, 45.3, 64, 90.5.
# 32, one: 16 exact, 16 · 8^(i/16) = 16, 18.2, 20.7, 23.6, 26.9, 30.6, 34.9, 39.7, 45.3, 51.5, 58.7,
#   66.8, 76.1, 86.7, 98.7, 112.4.
# 8, one, max_distance 64: 4 exact, 4 · 16^(i/4) = 4, 8, 16, 32.
BUCKETS: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "encoder": (32, {}, (*range(8), 8, 12, 16, 23, 32, 46, 64, 91)),
    "decoder": (
        32,
        {"bidirectional": False},
        (*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113),
    ),
    "borders at whole numbers": (
        8, {"bidirectional": False, "max_distance": 64}, (0, 1, 2, 3, 4, 8, 16, 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUCKETS)
def test_relative_position_uses_t5_buckets(name: str):
    num_buckets, options, first = BUCKETS[name]
    numbers = jnp.arange(num_buckets, dtype=jnp.float32)[:, None]
    mod = mods.relative_position(numbers, **options)
    before = np.arange(200)  # distance of the key before the query
    bucket_of = jax.vmap(lambda t, s: mod(jnp.float32(0), 0, 0, t, s))
    expected = np.searchsorted(first, before, side="right") - 1
    np.testing.assert_array_equal(bucket_of(200 + 0 * before, 200 - before), expected)
    after = np.asarray(bucket_of(200 + 0 * before, 200 + before))
    if options.get("bidirectional", True):
        np.testing.assert_array_equal(after[1:], num_buckets // 2 + expected[1:])
    else:
        np.testing.assert_array_equal(after, 0)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_position_agrees_with_its_definition(bidirectional: bool):
    # 8 buckets up to distance 6; both directions: 2 exact, then 2 · 3^(1/2) = 3.5; one: 4, and
    # 4 · 1.5^(i/4) = 4.4, 4.9, 5.4.
    bucket_of_distance = [0, 1, 2, 2] + [3] * 9 if bidirectional else [0, 1, 2, 3, 4, 6] + [7] * 7
    if bidirectional:
        buckets = np.array(bucket_of_distance)[np.abs(t - s)] + 4 * (s > t)
    else:
        buckets = np.array(bucket_of_distance)[np.maximum(t - s, 0)]
    options: dict[str, Any] = {"bidirectional": bidirectional, "max_distance": 6}

    def ours(q: Any, k: Any, v: Any, table: Any) -> jax.Array:
        mod = mods.relative_position(table, **options)
        return dot_product_attention(q, k, v, score_mod=mod)

    def plain(q: Any, k: Any, v: Any, table: Any) -> jax.Array:
        return by_definition(q, k, v, lambda x: x + jnp.moveaxis(table[buckets], -1, 0))

    assert_same(ours, plain, Q, KEY, V, TABLE)


@pytest.mark.parametrize(("bidirectional", "least"), [(True, 3), (False, 5)])
def test_max_distance_starts_above_the_exact_buckets(bidirectional: bool, least: int):
    options: dict[str, Any] = {"bidirectional": bidirectional}
    mods.relative_position(TABLE, max_distance=least, **options)
    with pytest.raises(ValueError, match=f"static int from {least} on, got {least - 1}"):
        mods.relative_position(TABLE, max_distance=least - 1, **options)
