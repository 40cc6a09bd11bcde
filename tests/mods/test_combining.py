"""Combined masks, a mask with a score_mod, and queries after a cache."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, mods
from tests.support.ready_made_mods import (
    KEY,
    SLOPES,
    B,
    N,
    Q,
    S,
    T,
    V,
    assert_masks,
    assert_same,
    by_definition,
    first_two,
    pairs,
    s,
    t,
)


def test_combined_masks_agree_with_their_definition():
    """Ready-made masks and user functions can be combined."""
    window = mods.dilated_window(6, 3)
    is_in_window = (s <= t) & (s >= t - 6) & ((t - s) % 3 == 0)
    even_heads = lambda b, n, t, s: n % 2 == 0  # noqa: E731
    assert_masks(mods.any_of(window, first_two), is_in_window | (s < 2))
    assert_masks(mods.all_of(window, mods.not_(first_two)), is_in_window & (s >= 2))
    is_even = np.arange(N)[:, None, None] % 2 == 0
    assert_masks(
        mods.any_of(mods.all_of(window, even_heads), first_two, mods.not_(even_heads)),
        np.broadcast_to((is_in_window & is_even) | (s < 2) | ~is_even, (B, N, T, S)),
    )


def test_python_bool_is_a_mask():
    always = lambda b, n, t, s: True  # noqa: E731
    combined = mods.all_of(always, mods.any_of(mods.not_(always), mods.chunked_window(4)))
    np.testing.assert_array_equal(pairs(combined), pairs(mods.chunked_window(4)))


def test_score_mod_and_mask_mod_together():
    lengths = np.array([3, 5])

    def ours(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
        return dot_product_attention(
            q, k, v, score_mod=mods.alibi(slopes), mask_mod=mods.prefix_lm(lengths)
        )

    mask = (s <= t) | (s < lengths[:, None, None, None])
    assert_same(
        ours,
        lambda q, k, v, slopes: by_definition(
            q, k, v, lambda x: x - slopes[:, None, None] * np.abs(t - s), mask
        ),
        Q, KEY, V, SLOPES,
    )  # fmt: skip


@pytest.mark.parametrize("offset", [4, (4, 1), np.array(2)], ids=["int", "rows", "array"])
def test_query_offset_counts_queries_after_a_cache(offset: Any):
    if isinstance(offset, tuple):
        offset = np.array(offset)
    positions = t + np.reshape(offset, (-1, 1, 1, 1))
    window = mods.with_query_offset(mods.chunked_window(6), offset)
    assert_masks(window, (s <= positions) & (positions // 6 == s // 6))

    def ours(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
        moved = mods.with_query_offset(mods.alibi(slopes), offset)
        return dot_product_attention(q, k, v, score_mod=moved)

    def plain(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
        distance = np.abs(positions - s)
        return by_definition(q, k, v, lambda x: x - slopes[:, None, None] * distance)

    assert_same(ours, plain, Q, KEY, V, SLOPES)
