"""The XLA implementation's memory is linear in the sequence lengths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch import dot_product_attention, ragged_dot_product_attention, xla
from attn_dispatch.call.options import backward_options
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.xla.blocks import SCORE_BYTES
from tests.support.option_parts import options_with

LONG = 32768
CPU = Device("cpu", "cpu", "CPU")


def operands(b: int = 1, n: int = 2, k: int = 1, h: int = 64) -> dict[str, jax.ShapeDtypeStruct]:
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "query": ((b, LONG, n, h), jnp.bfloat16),
        "key": ((b, LONG, k, h), jnp.bfloat16),
        "value": ((b, LONG, k, h), jnp.bfloat16),
        "bias": ((b, n, 1, LONG), jnp.float32),
        "mask": ((b, 1, 1, LONG), jnp.bool_),
        "query_seq_lengths": ((b,), jnp.int32),
        "query_segment_ids": ((b, LONG), jnp.int32),
        "key_value_segment_ids": ((b, LONG), jnp.int32),
        "alibi_slopes": ((1, n), jnp.float32),
        "sinks": ((1, n), jnp.float32),
        "dropout_key": ((1, 2), jnp.uint32),
    }
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def call(direction: str, b: int = 1) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """A forward or backward call with every option at once, and its abstract operands."""
    arrays = operands(b)
    options = options_with(
        operands=tuple(arrays),
        scale=0.125,
        is_causal=True,
        causal_alignment="bottom_right",
        window=(4096, None),
        logits_soft_cap=30.0,
        dropout_rate=0.1,
        dropout_impl="threefry2x32",
        needs_lse=True,
    )
    forward_spec = AttentionSpec.of(list(arrays.values()), options)
    if direction == "forward":
        return (lambda given: xla.forward(forward_spec, CPU, given)), arrays
    out, lse = forward_spec.results
    arrays |= {"out": out, "lse": lse, "out_grad": out, "lse_grad": lse}
    gradients = ("query", "key", "value", "bias", "alibi_slopes", "sinks")
    options = backward_options(options, gradients, has_lse_grad=True)
    spec = AttentionSpec.of(list(arrays.values()), options)
    return (lambda given: xla.backward(spec, CPU, given)), arrays


def values(jaxpr: Any) -> Iterator[Any]:
    """The types of everything that a jaxpr computes, its inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from values(inner)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_array_grows_with_both_lengths(direction):
    function, arrays = call(direction)
    found = list(values(jax.make_jaxpr(function)(arrays).jaxpr))
    assert len(found) > 100
    largest = max(found, key=lambda aval: getattr(aval, "size", 0))
    assert largest.size <= SCORE_BYTES // 4, largest


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_compiled_program_needs_less_than_all_scores(direction):
    function, arrays = call(direction)
    memory = jax.jit(function).lower(arrays).compile().memory_analysis()
    assert memory is not None
    one_dense_array = arrays["query"].shape[2] * LONG * LONG * 4
    assert memory.temp_size_in_bytes < one_dense_array / 4


@pytest.mark.parametrize(
    ("direction", "b", "bytes_with_chunks"),
    [
        ("forward", 1, 705_966_920),
        ("backward", 1, 1_411_144_848),
        ("forward", 32, 1_778_655_688),
        ("backward", 32, 3_272_349_392),
    ],
)
def test_blocks_need_no_more_memory_than_chunks_of_rows(direction, b, bytes_with_chunks):
    """Chunks covered the whole batch, with 16 rows for a batch of 32; blocks have 128 rows."""
    function, arrays = call(direction, b)
    memory = jax.jit(function).lower(arrays).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes <= bytes_with_chunks


def packed_call(kind: str, direction: str) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """A causal call of packed sequences by the public API, and its abstract arguments."""
    row = jax.ShapeDtypeStruct((LONG, 2, 64), jnp.bfloat16)
    if kind == "segment ids":
        packing = jax.ShapeDtypeStruct((LONG,), jnp.int32)

        def by_ids(q, k, v, ids):
            return dot_product_attention(
                q, k, v, is_causal=True, query_segment_ids=ids, max_segments=64
            )

        forward = by_ids
    else:
        packing = jax.ShapeDtypeStruct((65,), jnp.int32)

        def by_sequences(q, k, v, cu):
            return ragged_dot_product_attention(
                q, k, v, is_causal=True, cu_seqlens_q=cu, cu_seqlens_kv=cu,
                max_seqlen_q=LONG, max_seqlen_kv=LONG,
            )  # fmt: skip

        forward = by_sequences

    def backward(q, k, v, packing):
        def loss(*qkv):
            return forward(*qkv, packing).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    return (forward if direction == "forward" else backward), [row, row, row, packing]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["segment ids", "cu_seqlens"])
def test_packed_sequences_of_32k_tokens_need_linear_memory(kind, direction):
    function, arguments = packed_call(kind, direction)
    compiled = jax.jit(function).lower(*arguments).compile()
    assert not re.search(rf"\[(\d+,)*{LONG},{LONG}(,\d+)*\]", compiled.as_text())
    memory = compiled.memory_analysis()
    # A few blocks of scores, far less than even a boolean array [T, S].
    assert memory is not None and memory.temp_size_in_bytes < 6 * SCORE_BYTES < LONG * LONG
