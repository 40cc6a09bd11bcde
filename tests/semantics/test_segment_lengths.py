"""Segment ids with max_segment_len lower to the same custom calls as the ragged call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch
from attn_dispatch import dot_product_attention, ragged_dot_product_attention
from tests.support.backend import needs_cudnn

ROWS, SEQUENCES, LONGEST, HEADS, KV_HEADS, DIM = 2048, 8, 512, 8, 2, 128


def custom_calls(attention: Callable[..., Any], sequences: Any, *leading: int) -> list[str]:
    """The attributes of the forward and the backward custom call."""

    def both(q, k, v, out_grad, sequences):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, sequences), q, k, v)
        return out, pull(out_grad)

    arrays = [
        jax.ShapeDtypeStruct((*leading, ROWS, n, DIM), jnp.bfloat16)
        for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    with attn_dispatch.target("sm90"):
        traced = jax.jit(both).trace(*arrays, sequences)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @attn_dispatch_cudnn\w+\(.*?backend_config = \{(.*?)\}", text)


def by_ids(q: Any, k: Any, v: Any, ids: Any, **options: Any) -> Any:
    return dot_product_attention(
        q, k, v, query_segment_ids=ids, max_segments=SEQUENCES, is_causal=True, **options
    )


def ragged(q: Any, k: Any, v: Any, cu_seqlens: Any) -> Any:
    return ragged_dot_product_attention(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=LONGEST,
        max_seqlen_kv=LONGEST, is_causal=True,
    )  # fmt: skip


@needs_cudnn
@pytest.mark.parametrize("bounded", [True, False])
def test_custom_calls_equal_those_of_the_ragged_call_if_bounded(bounded):
    ids = jax.ShapeDtypeStruct((1, ROWS), jnp.int32)
    ends = jax.ShapeDtypeStruct((SEQUENCES + 1,), jnp.int32)
    options = {"max_segment_len": LONGEST} if bounded else {}
    found = custom_calls(lambda *x: by_ids(*x, **options), ids, 1)
    expected = custom_calls(ragged, ends)
    assert len(expected) == 2
    assert (found == expected) == bounded
