"""A long packed call makes no array of scores."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import attn_dispatch

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 32768, 8, 2, 128


def segments(q, k, v, ids):
    return attn_dispatch.dot_product_attention(
        q[None], k[None], v[None], query_segment_ids=ids[None], max_segments=64, is_causal=True,
        implementation="cudnn",
    )[0]  # fmt: skip


def ragged(q, k, v, ids):
    cu_seqlens = jnp.searchsorted(ids, jnp.arange(1, 66)).astype(jnp.int32)
    return attn_dispatch.ragged_dot_product_attention(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=TOKENS,
        max_seqlen_kv=TOKENS, is_causal=True, implementation="cudnn",
    )  # fmt: skip


@pytest.mark.parametrize("call", [segments, ragged])
def test_memory_is_linear(call, record):
    def step(q, k, v, ids, out_grad):
        out, pull = jax.vjp(lambda *qkv: call(*qkv, ids), q, k, v)
        return out, *pull(out_grad)

    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (jax.ShapeDtypeStruct((TOKENS, n, HEAD_DIM), jnp.bfloat16) for n in heads)
    ids = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    compiled = jax.jit(step).lower(q, k, v, ids, q).compile()
    memory = compiled.memory_analysis()
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    record(call=call.__name__, arrays=arrays, temporary=memory.temp_size_in_bytes)
    # The gradient of the queries is gathered in float32, and that of the keys for each query head.
    assert memory.temp_size_in_bytes < 3 * arrays
    assert not re.search(rf"\[[\d,]*{TOKENS},{TOKENS}\b", compiled.as_text())
