"""Arguments with the meaning of another library raise, warn or give NaN here.

One test for each line of "Coming from another library" in docs/semantics.md.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import (
    AttentionConventionWarning,
    dot_product_attention,
    ragged_dot_product_attention,
)

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 2, 8), np.float32)


def error(message: str, *arrays: Any, **arguments: Any) -> None:
    """The call raises a ValueError with this message."""
    with pytest.raises(ValueError, match=re.escape(message)):
        dot_product_attention(*(arrays or (X, X, X)), **arguments)


def warning(message: str, *arrays: Any, **arguments: Any) -> None:
    """The call warns once, at its own line, under jit too."""

    def call(arrays: Any) -> Any:
        return dot_product_attention(*arrays, **arguments)

    with pytest.warns(AttentionConventionWarning, match=re.escape(message)) as given:
        jax.jit(call)(arrays or (X, X, X))
        call(arrays or (X, X, X))
    (warned,) = given
    assert warned.filename == __file__
    # The warning points at the call itself.
    with open(__file__) as lines:
        assert "dot_product_attention(*arrays" in list(lines)[warned.lineno - 1]


def no_warning(*arrays: Any, **arguments: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dot_product_attention(*(arrays or (X, X, X)), **arguments)


def traced(ids: Any, **arguments: Any) -> np.ndarray:
    call = jax.jit(lambda ids: dot_product_attention(X, X, X, query_segment_ids=ids, **arguments))
    return np.asarray(call(jnp.asarray(ids)))


def test_segment_ids_from_0_warn():
    ids = np.array([[0, 0, 1, 1], [0, 1, 1, 2]])
    warning("query_segment_ids: every row begins with id 0, which is padding and attends nothing. "
            "Where ids count from 0 add 1 to them", query_segment_ids=ids)  # fmt: skip
    no_warning(query_segment_ids=ids + 1)
    # Padding on the left of only some rows is ordinary.
    no_warning(query_segment_ids=np.array([[0, 0, 1, 1], [1, 1, 1, 1]]))


def test_padding_on_the_left_of_every_row_does_not_warn():
    """With an id of max_segments, ids cannot be meant to count from 0."""
    no_warning(query_segment_ids=np.array([[0, 0, 1, 1], [0, 1, 1, 1]]), max_segments=1)


@pytest.mark.parametrize(("ids", "largest"), [([0, 0, 1, 1], 2), ([0, 0, 0, 0], 1)])
def test_segment_ids_from_0_warn_if_ids_plus_1_would_be_valid(ids: list[int], largest: int):
    rows = np.array([ids, ids])
    warning("every row begins with id 0", query_segment_ids=rows, max_segments=largest)


@pytest.mark.parametrize("limit", [None, 3])
def test_segment_ids_with_minus_1_as_padding_raise_or_give_nan(limit: int | None):
    ids = np.array([[1, 1, 2, -1], [1, 2, 3, 3]])
    error("query_segment_ids: expected ids of 0 (padding) and above, got -1; where -1 is padding "
          "add 1 to all ids", query_segment_ids=ids, max_segments=limit)  # fmt: skip
    got, expected = traced(ids, max_segments=limit), traced(np.maximum(ids, 0), max_segments=limit)
    assert np.isnan(got[0, 3]).all()
    np.testing.assert_array_equal(got[0, :3], expected[0, :3])
    np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.parametrize("limit", [None, 3])
def test_minus_1_as_an_unsigned_id_raises_or_gives_nan(limit: int | None):
    ids = np.array([[1, 1, 2, -1], [1, 2, 3, 3]])
    unsigned = ids.astype(np.uint32)
    error("query_segment_ids: expected ids below 2^31, got 4294967295",
          query_segment_ids=unsigned, max_segments=limit)  # fmt: skip
    got, expected = traced(unsigned, max_segments=limit), traced(ids, max_segments=limit)
    np.testing.assert_array_equal(got, expected)


INTERLEAVED = np.array([[1, 2, 1, 3], [2, 2, 3, 3]])


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "local_window_size": 0}])
def test_interleaved_segment_ids_are_compared_one_by_one(options: dict[str, Any]):
    same_segment = INTERLEAVED[:, None, :, None] == INTERLEAVED[:, None, None, :]
    if options:  # among the keys of its segment, each query attends only to itself
        same_segment = same_segment & np.eye(4, dtype=bool)
    expected = dot_product_attention(X, X, X, mask=same_segment)
    given = dot_product_attention(X, X, X, query_segment_ids=INTERLEAVED, **options)
    np.testing.assert_allclose(given, expected, atol=1e-6)
    np.testing.assert_allclose(traced(INTERLEAVED, **options), expected, atol=1e-6)


def test_interleaved_segment_ids_with_max_segments_raise_or_give_nan():
    error("query_segment_ids: expected ids ascending along the row with max_segments, got 1 after "
          "2; without max_segments ids may stand in any order, which kernels run as a mask",
          query_segment_ids=INTERLEAVED, max_segments=3)  # fmt: skip
    got, expected = traced(INTERLEAVED, max_segments=3), traced(INTERLEAVED)
    assert np.isnan(got[0, [0, 2]]).all()
    rest = (np.array([0, 0, 1, 1, 1, 1]), np.array([1, 3, 0, 1, 2, 3]))
    np.testing.assert_allclose(got[rest], expected[rest], atol=1e-6)


@pytest.mark.parametrize("window", [(-1, -1), (3, -1), -1])
def test_window_with_minus_1_raises_or_gives_nan(window: Any):
    error("both ends included, with None, not -1, on an open side, got", local_window_size=window)
    call = jax.jit(lambda w: dot_product_attention(X, X, X, local_window_size=(w, None)))
    assert np.isnan(call(-1)).all()


def test_arrays_with_heads_before_length_warn():
    x = np.zeros((2, 2, 160, 8), np.float32)
    warning("arrays are [batch, length, heads, dim]; for [batch, heads, length, dim] pass "
            'qkv_layout="BNTH"', x, x, x)  # fmt: skip
    no_warning(x, x, x, qkv_layout="BNTH")
    swapped = np.swapaxes(x, 1, 2)
    warning("arrays are [batch, heads, length, dim]; for [batch, length, heads, dim] leave out "
            "qkv_layout", swapped, swapped, swapped, qkv_layout="BNTH")  # fmt: skip
    error("(arrays are [batch, length, heads, dim])", np.zeros((2, 4, 9, 8), np.float32), X, X)
    step = np.zeros((2, 1, 128, 128), np.float32)  # a decoding step with many heads
    no_warning(step, step, step)


@pytest.mark.parametrize(
    ("query", "key", "options"),
    [
        ((2, 8, 50, 8), (2, 8, 50, 8), {}),  # 50 is no usual number of heads
        ((2, 8, 100, 128), (2, 8, 100, 128), {}),  # nor is 100
        ((2, 8, 64, 64), (2, 8, 64, 64), {}),  # 64 heads would be wider
        ((2, 8, 64, 128), (2, 4, 64, 128), {}),  # heads in groups of 2
        ((2, 8, 128, 128), (2, 8, 64, 128), {}),  # models do not group 64 kv heads
        ((2, 8, 64, 128), (2, 8, 64, 128), {"local_window_size": (15, 0)}),  # wider than 8 keys
    ],
)
def test_shorter_arrays_warn_if_the_head_count_grouping_or_window_fits_heads_before_length(
    query: Any, key: Any, options: dict[str, Any]
):
    q, k = np.zeros(query, np.float32), np.zeros(key, np.float32)
    warning(f"key has {key[1]} keys of {key[2]} heads: arrays are [batch, length, heads, dim]; for "
            '[batch, heads, length, dim] pass qkv_layout="BNTH"; where the axes are as read pass '
            'qkv_layout="BTNH"', q, k, k, **options)  # fmt: skip
    no_warning(q, k, k, qkv_layout="BTNH", **options)
    no_warning(q, k, k, qkv_layout="BNTH", **options)


def test_short_prompts_of_many_heads_do_not_warn():
    for shape in ((1, 5, 32, 8), (1, 5, 40, 64), (2, 8, 64, 96), (1, 2, 128, 192)):
        x = np.zeros(shape, np.float32)
        no_warning(x, x, x)
        no_warning(x, x, x, local_window_size=(255, 0))


@pytest.mark.parametrize("shape", [(2, 16, 512), (8, 50, 64), (8, 160, 64)])
def test_arrays_of_three_dims_with_a_batch_warn(shape: tuple[int, ...]):
    x = np.zeros(shape, np.float32)
    warning(f"key has 3 dims, which are read as [length, heads, dim]: {shape[0]} keys of "
            f"{shape[1]} heads of {shape[2]}; split features [batch, length, features] by "
            "x.reshape(batch, length, heads, dim); for [heads, length, dim] pass "
            'qkv_layout="BNTH"; where the axes are as read pass qkv_layout="BTNH"',
            x, x, x)  # fmt: skip
    no_warning(x, x, x, qkv_layout="BTNH")
    no_warning(x.swapaxes(0, 1), x.swapaxes(0, 1), x.swapaxes(0, 1))


def test_ids_sinks_and_slopes_of_swapped_arrays_get_a_hint():
    x = np.zeros((2, 4, 16, 8), np.float32)
    hint = '; these look swapped: for [batch, heads, length, dim] pass qkv_layout="BNTH"'
    error(f"got [2, 16]{hint}", x, x, x, query_segment_ids=np.ones((2, 16), int))
    error(f"got [4]{hint}", x, x, x, sinks=np.ones(4, np.float32))
    error(f"got [4]{hint}", x, x, x, alibi_slopes=np.ones(4, np.float32))


def test_mask_of_batch_queries_and_keys_raises_or_warns():
    x = np.zeros((3, 4, 2, 8), np.float32)
    for name, dtype in (("mask", bool), ("bias", np.float32)):
        error(f"got [3, 4, 4]; of [batch, queries, keys] pass {name}[:, None]",
              x, x, x, **{name: np.ones((3, 4, 4), dtype)})  # fmt: skip
    mask = np.ones((2, 4, 4), bool)
    warning("mask: [2, 4, 4] is taken for [heads, queries, keys], and the batch is 2 too. If it is "
            "[batch, queries, keys] pass mask[:, None]; else pass mask[None]",
            mask=mask)  # fmt: skip
    no_warning(mask=mask[:, None])
    no_warning(mask=mask[None])
    no_warning(mask=mask[:1])


def test_mask_of_batch_and_keys_raises_or_warns():
    keys = np.zeros((2, 6, 2, 8), np.float32)
    error(
        "; of [batch, keys] pass mask[:, None, None, :]", X, keys, keys, mask=np.ones((2, 6), bool)
    )
    error(
        "; of [batch, keys] pass bias[:, None, None, :]", X, keys, keys, bias=np.ones((2, 6), "f")
    )
    x = np.zeros((4, 4, 2, 8), np.float32)
    mask = np.ones((4, 4), bool)
    warning("mask: [4, 4] is taken for [queries, keys], and the batch is 4 too. If it is [batch, "
            "keys] pass mask[:, None, None, :]; else pass mask[None, None]",
            x, x, x, mask=mask)  # fmt: skip
    no_warning(x, x, x, mask=mask[None, None])
    no_warning(x, x, x, mask=mask[:, None, None, :])
    no_warning(mask=mask)  # the batch is 2


def test_one_query_under_top_left_causality_warns():
    query = X[:, :1]
    warning("is_causal=True with one query and several keys: top-left causality lets it attend key "
            '0 alone. For a cache pass causal_alignment="bottom_right"',
            query, X, X, is_causal=True)  # fmt: skip
    for alignment in ("bottom_right", "top_left"):
        no_warning(query, X, X, is_causal=True, causal_alignment=alignment)
    no_warning(query, X[:, :1], X[:, :1], is_causal=True)


def test_one_query_under_a_top_left_window_or_alibi_warns():
    query, slopes = X[:, :1], np.ones(X.shape[2], np.float32)
    both = {"local_window_size": (1, None), "alibi_slopes": slopes}
    for names in (["local_window_size"], ["alibi_slopes"], list(both)):
        given: dict[str, Any] = {name: both[name] for name in names}
        warning(f"{' and '.join(names)} with one query and several keys: top-left alignment counts "
                "distances from key 0. For a cache pass causal_alignment=\"bottom_right\"",
                query, X, X, **given)  # fmt: skip
        no_warning(query, X, X, causal_alignment="bottom_right", **given)
        no_warning(query, X[:, :1], X[:, :1], **given)
    no_warning(query, X, X, local_window_size=(None, None))


def test_several_queries_before_more_keys_warn():
    query, ways = X[:, :3], '. For a cache pass causal_alignment="bottom_right", with '
    ways += "key_value_seq_lengths where it is not full; where the queries are the first pass "
    ways += 'causal_alignment="top_left"'
    for name, options in (
        ("is_causal=True", {"is_causal": True}),
        ("local_window_size=(…, 0)", {"local_window_size": (2, 0)}),
    ):
        warning(f"{name} with 3 queries and 4 keys: top-left causality lets query i attend keys up "
                f"to i, so that no query attends the last 1{ways}",
                query, X, X, **options)  # fmt: skip
        for alignment in ("bottom_right", "top_left"):
            no_warning(query, X, X, causal_alignment=alignment, **options)
        no_warning(X, X, X, **options)
        no_warning(X, query, query, **options)
        lengths = np.array([2, 3])
        no_warning(query, X, X, query_seq_lengths=lengths, key_value_seq_lengths=lengths, **options)
    no_warning(query, X, X, local_window_size=(2, 1))


LENGTHS = np.array([2, 4])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "causal_alignment": "bottom_right"},
        {"local_window_size": (1, 1)},
        {"mask": np.ones((1, 2, 4, 4), bool)},
        {"bias": np.zeros((1, 2, 4, 4), np.float32)},
    ],
    ids=["alone", "bottom_right", "window", "mask_of_all_rows", "bias_of_all_rows"],
)
def test_lengths_of_queries_alone_warn_in_self_attention(options: dict[str, Any]):
    warning("query_seq_lengths without key_value_seq_lengths, and as many keys as queries: real "
            "queries attend padded keys too. For self-attention pass the same array as "
            "key_value_seq_lengths, or only query_segment_ids, 0 in padding, which hold for "
            "both sides; where all keys are real pass 4 for each row as key_value_seq_lengths",
            query_seq_lengths=LENGTHS, **options)  # fmt: skip


def test_lengths_of_queries_do_not_warn_if_padding_is_masked_or_it_is_no_self_attention():
    lengths: dict[str, Any] = {"query_seq_lengths": LENGTHS}
    for options in (
        {"key_value_seq_lengths": LENGTHS},
        {"key_value_seq_lengths": np.array([4, 4])},
        {"is_causal": True},
        {"local_window_size": (2, 0)},
        {"mask": (np.arange(4) < LENGTHS[:, None])[:, None, None]},
        {"mask_mod": lambda b, n, t, s: s < 2},
        {"query_segment_ids": np.array([[1, 1, 0, 0], [1, 1, 1, 1]])},
    ):
        no_warning(**lengths, **options)
    no_warning(query_seq_lengths=np.array([4, 4]))
    no_warning(X[:, :3], X, X, query_seq_lengths=np.array([2, 3]))  # not self-attention


def test_packed_sequences_of_one_query_warn():
    q, k = np.zeros((2, 2, 8), np.float32), np.zeros((8, 2, 8), np.float32)

    def messages(**options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            ragged_dot_product_attention(
                q, k, k, cu_seqlens_q=[0, 1, 2], cu_seqlens_kv=[0, 4, 8], max_seqlen_q=1,
                max_seqlen_kv=4, **options,
            )  # fmt: skip
        return [str(x.message) for x in given]

    (message,) = messages(is_causal=True)
    assert message.endswith(
        'For a cache pass causal_alignment="bottom_right"; where the query is the first pass '
        'causal_alignment="top_left"'
    )
    (message,) = messages(local_window_size=(1, None))
    assert message.startswith("local_window_size with one query and several keys")
    assert messages(is_causal=True, causal_alignment="bottom_right") == [] == messages()


def test_warning_is_given_once_at_each_line():
    def lines() -> list[int]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                dot_product_attention(X[:, :1], X, X, is_causal=True)
            dot_product_attention(X[:, :1], X, X, is_causal=True)
        return [x.lineno for x in caught]

    first, second = lines()
    assert second == first + 1 and lines() == []


def test_warning_about_traced_values_points_at_the_call(monkeypatch):
    """The running program finds the value; the warning names the line that made the call."""
    ids = jnp.array([[0, 0, 1, 1]] * 2)

    @jax.jit
    def attend(ids: jax.Array) -> jax.Array:
        return dot_product_attention(X, X, X, query_segment_ids=ids)  # the line

    monkeypatch.setenv("ATTN_DISPATCH_CHECK", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.block_until_ready(attend(ids))
        jax.effects_barrier()
    lines = {Path(__file__).read_text().splitlines()[x.lineno - 1] for x in caught}
    assert len(lines) == 1 and lines.pop().endswith("# the line")


def test_soft_cap_with_a_bias_warns():
    bias = np.ones((4, 4), np.float32)[None]
    warning("logits_soft_cap with bias: the score is capped, then the bias is added",
            bias=bias, logits_soft_cap=5.0)  # fmt: skip
    no_warning(logits_soft_cap=5.0)
    no_warning(bias=bias)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_mask_of_0_and_1_raises(dtype: Any):
    error(f"mask: expected dtype bool (True = attend), got {np.dtype(dtype).name}; for 0 and 1 "
          "pass mask != 0, and for numbers that are added to scores pass bias",
          mask=np.ones((4, 4), dtype))  # fmt: skip
