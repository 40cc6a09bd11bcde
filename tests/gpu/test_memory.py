"""Memory: a long packed call makes no array of scores, and a bias over a batch only few."""

from __future__ import annotations

import re
from typing import Any

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
def test_packed_calls_take_memory_linear_in_tokens(call, record):
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
    # The gradient of the queries is summed in float32, that of the keys for each query head.
    assert memory.temp_size_in_bytes < 3 * arrays
    assert not re.search(rf"\[[\d,]*{TOKENS},{TOKENS}\b", compiled.as_text())


def bias_gradients(out_grad, q, k, v, bias):
    def call(q, k, v, bias):
        return attn_dispatch.dot_product_attention(q, k, v, bias=bias, implementation="cudnn")

    return jax.vjp(call, q, k, v, bias)[1](out_grad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_of_a_bias_takes_less_than_2_gb(dtype, record):
    """As one call the backward pass would take 17 GB of scratch memory."""
    batch, tokens, heads = 64, 2048, 32
    q = jax.ShapeDtypeStruct((batch, tokens, heads, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, heads, tokens, tokens), dtype)
    compiled = jax.jit(bias_gradients).lower(q, q, q, q, bias).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    record(dtype=dtype, temporary=temporary)
    assert temporary < 2e9


@pytest.mark.parametrize("limit", ["13MB", "40MB", "off"])
def test_gradients_of_a_bias_in_parts_are_right(limit, record):
    keys = jax.random.split(jax.random.key(3), 5)
    arrays = [jax.random.normal(key, (12, 512, 8, 64), jnp.bfloat16) for key in keys[:4]]
    bias = jax.random.normal(keys[4], (1, 8, 512, 512), jnp.bfloat16)
    with attn_dispatch.scratch_limit(limit):
        compiled = jax.jit(lambda *x: bias_gradients(*x)).lower(*arrays, bias).compile()
    found = compiled(*arrays, bias)

    def plain(q, k, v, bias):
        q, k, v, bias = (x.astype(jnp.float32) for x in (q, k, v, bias))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / 8 + bias
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v, precision="highest")

    out_grad, *qkv = arrays
    expected = jax.vjp(plain, *qkv, bias)[1](out_grad.astype(jnp.float32))
    errors: dict[str, Any] = {}
    for name, x, y in zip(("query", "key", "value", "bias"), found, expected, strict=True):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        errors[name] = float(jnp.abs(x - y).max() / jnp.abs(y).max())
    record(limit=limit, temporary=compiled.memory_analysis().temp_size_in_bytes, **errors)
    assert max(errors.values()) < 0.02, errors
