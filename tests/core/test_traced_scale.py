"""The scale as an array: traced, or with one number for each head."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from attn_dispatch import (
    dot_product_attention,
    explain,
    ragged_dot_product_attention,
    target,
)

_rng = np.random.default_rng(0)
Q, K, V = (_rng.standard_normal(shape) for shape in ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 7)))
NUMBERS = [0.3, 1.0, -0.7, 0.0]


def arrays(dtype: Any) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(x, dtype) for x in (Q, K, V))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "logits_soft_cap": 2.0}], ids=str)
def test_traced_scale_gives_the_results_of_a_static_one(number: float, options: dict[str, Any]):
    call = partial(dot_product_attention, return_lse=True, **options)
    q, k, v = arrays(np.float32)
    got = jax.jit(lambda scale: call(q, k, v, scale=scale))(number)
    for x, y in zip(got, call(q, k, v, scale=number), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
@pytest.mark.parametrize("is_ragged", [False, True])
def test_scale_with_one_number_for_each_head(shape: tuple[int, ...], is_ragged: bool):
    scale = np.asarray(_rng.standard_normal(shape), np.float32)
    q, k, v = arrays(np.float32)
    if is_ragged:
        cu_q, cu_kv = np.array([0, 2, 5]), np.array([0, 3, 6])
        lengths: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
        lengths |= {"max_seqlen_q": 3, "max_seqlen_kv": 3}
        call = partial(ragged_dot_product_attention, **lengths)
        q, k, v = q[0], k[0], v[0]
    else:
        call = dot_product_attention
    got = jax.jit(lambda scale: call(q, k, v, scale=scale))(scale)
    for n in range(4):
        query_head, kv_head = slice(n, n + 1), slice(n // 2, n // 2 + 1)
        number = float(scale[n] if shape else scale)
        expected = call(q[..., query_head, :], *(x[..., kv_head, :] for x in (k, v)), scale=number)
        np.testing.assert_allclose(got[..., query_head, :], expected, rtol=1e-5, atol=1e-6)
    if shape:  # the scale need not be traced
        np.testing.assert_allclose(call(q, k, v, scale=scale), got, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [np.float64(0.4), np.float64(0.0), np.array([0.4, -1, 0, 2])])
def test_derivatives_by_the_scale_agree_with_finite_differences(scale: Any):
    with jax.enable_x64(True):

        def function(q, scale):
            out = dot_product_attention(q, K, V, scale=scale, return_lse=True, is_causal=True)
            return out

        # jit makes the number an argument, and so a traced array.
        check_grads(jax.jit(function), (Q, scale), order=2, modes=["fwd", "rev"], rtol=1e-5)


def test_traced_scale_rounds_the_bfloat16_query_once():
    """1/√H changes nothing; another scale adds at most the error of rounding the query."""
    q, k, v = arrays(jnp.bfloat16)
    call = jax.jit(lambda scale, *x: dot_product_attention(*x, scale=scale))
    default = dot_product_attention(q, k, v)
    np.testing.assert_array_equal(
        np.asarray(call(jnp.float32(8**-0.5), q, k, v), np.float32), np.asarray(default, np.float32)
    )

    exact = np.asarray(call(0.6, *(x.astype(np.float32) for x in (q, k, v))))
    traced, static = (
        np.abs(np.asarray(x, np.float32) - exact).max()
        for x in (call(0.6, q, k, v), dot_product_attention(q, k, v, scale=0.6))
    )
    rounded = exact - np.asarray(
        dot_product_attention(q * jnp.bfloat16(1 + 2**-7), k, v, scale=0.6), np.float32
    )
    assert traced <= static + np.abs(rounded).max()


def test_dtypes_of_scale_and_of_its_gradient():
    q, k, v = arrays(jnp.bfloat16)
    for dtype in ("float32", "bfloat16", "float16"):
        scale = jnp.full((4,), 0.5, dtype)
        got = jax.grad(lambda s: dot_product_attention(q, k, v, scale=s).sum().astype("float32"))
        assert got(scale).dtype == dtype
        assert dot_product_attention(q, k, v, scale=scale).dtype == jnp.bfloat16


def test_vmap_and_scan_over_scales_agree_with_single_calls():
    q, k, v = arrays(np.float32)
    scales = np.array(NUMBERS, np.float32)
    expected = jnp.stack([dot_product_attention(q, k, v, scale=float(s)) for s in scales])

    def call(scale):
        return dot_product_attention(q, k, v, scale=scale)

    np.testing.assert_allclose(jax.vmap(call)(scales), expected, rtol=1e-5, atol=1e-6)
    _, scanned = jax.lax.scan(lambda carry, s: (carry, call(s)), 0, scales)
    np.testing.assert_allclose(scanned, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "platform", "device"), [("cudnn", "cuda", "sm90"), ("aiter", "rocm", "gfx942")]
)
def test_kernels_run_calls_with_a_traced_scale(name: str, platform: str, device: str):
    q = jnp.zeros((2, 64, 4, 64), jnp.bfloat16)

    def loss(scale, q):
        out = dot_product_attention(q, q, q, scale=scale, is_causal=True, implementation=name)
        return out.astype(jnp.float32).sum()

    with target(device):
        gradient = jax.jit(jax.grad(loss, (0, 1)))
        text = gradient.trace(jnp.float32(1), q).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"@attn_dispatch_{name}_forward(") == 1
    assert text.count(f"@attn_dispatch_{name}_backward(") == 1


def test_array_scale_promotes_no_rank():
    operands = arrays(np.float32)
    with jax.numpy_rank_promotion("raise"):
        for scale in (np.float32(0.3), np.full(4, 0.3, np.float32)):
            gradient = jax.jit(jax.grad(lambda s: dot_product_attention(*operands, scale=s).sum()))
            assert gradient(scale).shape == scale.shape


def test_explain_accepts_a_scale_without_values():
    x = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert explain(x, x, x, scale=scale, target="gfx942").chosen_forward == "aiter"
