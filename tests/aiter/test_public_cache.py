"""The public calls on AITER with a cache: in pages, and as an array."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import (
    dot_product_attention,
    paged_attention,
)
from tests.support.aiter_public import SLOPES, arrays, assert_close

pytestmark = pytest.mark.usefixtures("emulator")


def pages(t: int, *, page: int = 128, h: int = 16) -> tuple[list[jax.Array], jax.Array]:
    """The query, pages, table and lengths of three rows; NaN fills what belongs to no row."""
    rng = np.random.default_rng(t + page)
    table = rng.permutation(11)[:9].reshape(3, 3)
    lengths = np.array([2 * page + 7, 0, page])
    pools = np.full((2, 11, page, 2, h), np.nan)
    for row, length in enumerate(lengths):
        for s in range(length):
            pools[:, table[row, s // page], s % page] = rng.standard_normal((2, 2, h))
    table[1], table[2, 1:] = 2**30, -5
    query = rng.standard_normal((3, t, 4, h))
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (query, *pools)]
    return [*arrays, jnp.asarray(table)], jnp.asarray(lengths)


PAGED: dict[str, tuple[int, dict[str, Any]]] = {
    "decoding": (1, {}),
    "few queries": (4, {}),
    "a chunk of a prompt": (20, {}),
    "chunks of different lengths": (20, {"query_seq_lengths": np.array([20, 3, 11])}),
    "not causal": (5, {"is_causal": False}),
    "window": (12, {"local_window_size": (200, 0)}),
    "small window": (1, {"local_window_size": (20, 0)}),
    "soft cap": (1, {"logits_soft_cap": 2.0}),
    "soft cap, few queries": (5, {"logits_soft_cap": 2.0}),
    "ALiBi": (3, {"alibi_slopes": SLOPES}),
    "sinks": (1, {"sinks": np.linspace(-1, 2, 4, dtype=np.float32)}),
}


@pytest.mark.parametrize("name", PAGED)
def test_pages_are_read_in_place(emulator, name: str):
    t, options = PAGED[name]
    arrays, lengths = pages(t)
    call = jax.jit(partial(paged_attention, return_lse=True, **options))
    got = jax.block_until_ready(call(*arrays, lengths))
    assert (emulator.calls("split_kv"), emulator.calls("forward")) == (1, 0)
    with attn_dispatch.fallback("silent"):
        expected = paged_attention(
            *arrays, lengths, return_lse=True, implementation="xla", **options
        )
    assert_close(*([np.asarray(x, np.float32) for x in y] for y in (got, expected)))
    assert emulator.calls("split_kv") == 1
    is_read = emulator.last_call("split_kv").page_size == 128
    assert is_read == (name != "small window")  # whose keys are copied


def test_pages_of_16_are_gathered_first(emulator):
    arrays, lengths = pages(1, page=16)
    got = jax.block_until_ready(paged_attention(*arrays, lengths))
    assert emulator.calls("split_kv") == 1
    assert emulator.last_call("split_kv").page_size == 0
    expected = paged_attention(*arrays, lengths, implementation="xla")
    assert_close([np.asarray(got, np.float32)], [np.asarray(expected, np.float32)])


def test_ragged_queries_run_on_split_kv(emulator):
    arrays, lengths = pages(8)
    query = arrays[0].reshape(24, 4, 16)
    cu_seqlens = {"cu_seqlens_q": jnp.array([0, 9, 9, 20]), "max_seqlen_q": 11}
    got = jax.block_until_ready(paged_attention(query, *arrays[1:], lengths, **cu_seqlens))
    assert emulator.calls("split_kv") == 1
    expected = paged_attention(query, *arrays[1:], lengths, **cu_seqlens, implementation="xla")
    assert_close([np.asarray(got, np.float32)], [np.asarray(expected, np.float32)])
    assert not np.asarray(got[20:]).any()


def test_a_wrong_page_or_length_makes_its_row_nan():
    arrays, lengths = pages(1)
    arrays[3] = arrays[3].at[2, 0].set(11)
    got = jax.jit(paged_attention)(*arrays, lengths.at[1].set(385))
    assert np.isnan(np.asarray(got, np.float32)).all(axis=(1, 2, 3)).tolist() == [False, True, True]


@pytest.mark.parametrize("t", [1, 3, 8])
def test_a_few_queries_with_key_lengths_run_on_split_kv(emulator, t: int):
    """Without key lengths a call does not count as decoding."""
    q, k, v = arrays(t=t, s=300)
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    lengths = jnp.array([3, 300])
    k, v = (x.at[0, 3:].set(jnp.nan) for x in (k, v))
    got = dot_product_attention(q, k, v, key_value_seq_lengths=lengths, **options)
    jax.block_until_ready(got)
    assert (emulator.calls("split_kv"), emulator.calls("forward")) == (1, 0)
    expected = dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths, **options, implementation="xla"
    )
    assert_close([np.asarray(got, np.float32)], [np.asarray(expected, np.float32)])
    jax.block_until_ready(dot_product_attention(q, *arrays(t=t, s=300)[1:], **options))
    assert (emulator.calls("split_kv"), emulator.calls("forward")) == (1, 1)
