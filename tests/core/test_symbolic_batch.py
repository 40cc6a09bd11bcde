"""Exported modules can have a symbolic batch and, where XLA computes the call, lengths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import (
    AttentionFallbackWarning,
    dot_product_attention,
    ragged_dot_product_attention,
    target,
)

pytestmark = pytest.mark.filterwarnings("ignore:is_causal=True with one query")


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return dot_product_attention(q, k, v, is_causal=True)


def gradient(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.grad(lambda q: attend(q, k, v).sum())(q)


@pytest.mark.parametrize("function", [attend, gradient])
def test_export_with_a_symbolic_batch(function: Any):
    (batch,) = jax.export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, 6, 2, 8), jnp.float32)
    exported = jax.export.export(jax.jit(function))(shape, shape, shape)
    for b in (1, 3):
        x = jax.random.normal(jax.random.key(b), (b, 6, 2, 8))
        np.testing.assert_allclose(exported.call(x, x, x), function(x, x, x), atol=1e-6)


def with_options(q: jax.Array, k: jax.Array, **options: Any) -> jax.Array:
    """A call with every option that a symbolic length allows."""
    b, t, n, _ = q.shape
    s = k.shape[1]
    return dot_product_attention(
        q,
        k,
        k,
        jnp.arange(t * s, dtype=q.dtype).reshape(t, s) % 3,
        is_causal=True,
        causal_alignment="bottom_right",
        local_window_size=4,
        query_seq_lengths=jnp.arange(b) % t + 1,
        key_value_seq_lengths=jnp.arange(b) % s + 2,
        alibi_slopes=jnp.arange(n, dtype=q.dtype),
        sinks=jnp.ones(n),
        dropout_rate=0.3,
        dropout_key=jax.random.key(0),
        **options,
    )


def plain(q: jax.Array, k: jax.Array) -> jax.Array:
    return dot_product_attention(q, k, k, is_causal=True)


PROGRAMS: dict[str, Any] = {
    "plain": plain,
    "options": with_options,
    "gradient": jax.grad(lambda q, k: (with_options(q, k) ** 2).sum(), (0, 1)),
    "jvp of gradient": lambda q, k: jax.jvp(
        jax.grad(lambda q, k: (plain(q, k) ** 2).sum()), (q, k), (q, k)
    ),
    "vmap": jax.vmap(plain),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_export_with_symbolic_lengths(name: str):
    function = PROGRAMS[name]
    t, s, b = jax.export.symbolic_shape("t, s, b")
    shapes = [jax.ShapeDtypeStruct((b, x, n, 8), jnp.float32) for x, n in ((t, 4), (s, 2))]
    batch: tuple[int, ...] = ()
    if name == "vmap":
        shapes = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes]
        batch = (3,)
    exported = jax.export.export(jax.jit(function))(*shapes)
    for sizes in ((2, 5, 7), (1, 6, 6), (3, 1, 4)):
        b, t, s = sizes
        q, k = (
            jax.random.normal(jax.random.key(t), (*batch, b, x, n, 8)) for x, n in ((t, 4), (s, 2))
        )
        got, expected = (jax.tree.leaves(x(q, k)) for x in (exported.call, function))
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_packed_sequences_with_symbolic_lengths_raise():
    (t,) = jax.export.symbolic_shape("t")
    x, cu = jax.ShapeDtypeStruct((t, 4, 8), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
    ids = jax.ShapeDtypeStruct((t,), jnp.int32)

    def ragged(x, cu):
        return ragged_dot_product_attention(
            x, x, x, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=5, max_seqlen_kv=5
        )

    def segmented(x, ids):
        return dot_product_attention(x, x, x, query_segment_ids=ids, is_causal=True)

    for function, second in ((ragged, cu), (segmented, ids)):
        with pytest.raises(NotImplementedError, match=r"need lengths that are known, and .*t"):
            jax.export.export(jax.jit(function))(x, second)


def test_symbolic_head_dim_raises():
    (h,) = jax.export.symbolic_shape("h")
    x = jax.ShapeDtypeStruct((2, 5, 2, h), jnp.float32)
    with pytest.raises(ValueError, match="expected a head dim that is known, got the symbol h"):
        jax.export.export(jax.jit(lambda x: dot_product_attention(x, x, x)))(x)


@pytest.mark.parametrize(("platform", "device"), [("cuda", "sm90"), ("rocm", "gfx942")])
def test_kernels_refuse_symbolic_shapes(platform: str, device: str):
    (b,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, 64, 4, 64), jnp.bfloat16)

    def export(**options: Any) -> None:
        def attend(x):
            return dot_product_attention(x, x, x, **options)

        with target(device):
            jax.export.export(jax.jit(attend), platforms=[platform])(x)

    with pytest.warns(
        AttentionFallbackWarning, match="planned for known shapes, and b is a symbol"
    ):
        export()
    with pytest.raises(NotImplementedError, match="planned for known shapes, and b is a symbol"):
        export(implementation="cudnn" if platform == "cuda" else "aiter")
