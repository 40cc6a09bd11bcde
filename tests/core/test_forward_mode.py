"""Derivatives other than one reverse pass: jvp, jacfwd, hessian, grad of grad."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from attn_dispatch import (
    AttentionFallbackWarning,
    dot_product_attention,
    fallback,
    ragged_dot_product_attention,
    target,
)
from attn_dispatch.xla import blocks
from tests.support.backend import needs_cudnn

_rng = np.random.default_rng(0)
Q, K, V = (_rng.standard_normal(shape) for shape in ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 7)))
BIAS, SINKS, SLOPES = (_rng.standard_normal(shape) for shape in ((4, 5, 6), (4,), (4,)))
OUT_GRAD = _rng.standard_normal((2, 5, 4, 7))
LENGTHS = {"query_seq_lengths": np.array([5, 3]), "key_value_seq_lengths": np.array([4, 6])}
IDS = {
    "query_segment_ids": np.array([[1, 1, 2, 2, 0]] * 2),
    "key_value_segment_ids": np.array([[1, 1, 0, 2, 2, 2]] * 2),
}

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right, some rows attend nothing": {
        "is_causal": True,
        "causal_alignment": "bottom_right",
        **LENGTHS,
    },
    "window and soft cap": {"local_window_size": (2, 1), "logits_soft_cap": 2.0},
    "segments": {"is_causal": True, **IDS},
    "mask": {"mask": np.tril(np.ones((5, 6), bool), -1)},
    "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)},
}


pytestmark = pytest.mark.filterwarnings("ignore:logits_soft_cap with bias")


def outputs(options: dict[str, Any], *arrays: Any) -> Any:
    """out, weighted, and lse where finite, as a function of q, k, v, bias, sinks and slopes."""
    q, k, v, bias, sinks, slopes = arrays
    out, lse = dot_product_attention(
        q, k, v, bias, sinks=sinks, alibi_slopes=slopes, return_lse=True, **options
    )
    return out * OUT_GRAD, jnp.where(jnp.isneginf(lse), 0, lse)


ARRAYS = (Q, K, V, BIAS, SINKS, SLOPES)


TOGETHER = {
    "bottom right, mask": ("bottom right, some rows attend nothing", "mask"),
    "causal window, segments, soft cap, dropout": ("segments", "window and soft cap", "dropout"),
}
"""Options to test together in several blocks, where they hardly interact, to save time."""


def make_blocks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SCORE_BYTES", 600)
    monkeypatch.setattr(blocks, "ENOUGH_ROWS", 2)


def check_derivatives(options: dict[str, Any]) -> None:
    """Compare derivatives of first order in both modes, and of second, with finite differences."""
    with jax.enable_x64(True):
        function = jax.jit(partial(outputs, options))
        check_grads(function, ARRAYS, order=2, modes=["fwd", "rev"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_derivatives_agree_with_finite_differences(options: dict[str, Any]):
    check_derivatives(options)


@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER)
def test_derivatives_in_many_blocks(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    make_blocks_small(monkeypatch)
    check_derivatives({x: y for name in names for x, y in CALLS[name].items()})


@pytest.mark.parametrize("order", ["jacfwd", "jacrev", "hessian", "grad of grad", "rev of fwd"])
def test_every_way_of_differentiating_agrees_with_jax_nn(order: str):
    def program(attention: Any) -> Any:
        def loss(q, k):
            return (attention(q, k, v) ** 2).sum()

        if order == "grad of grad":
            return jax.grad(lambda q: (jax.grad(loss, 1)(q, k) ** 2).sum())(q)
        if order == "rev of fwd":
            return jax.grad(lambda q: jax.jvp(loss, (q, k), (q, k))[1])(q)
        if order == "hessian":
            return jax.hessian(loss, (0, 1))(q, k)
        return getattr(jax, order)(lambda q: attention(q, k, v))(q)

    q, k, v = (x[:1].astype(np.float32) for x in (Q, K, K + 1))
    got = jax.jit(lambda: program(partial(dot_product_attention, is_causal=True)))()
    expected = program(partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_bfloat16_is_as_exact_as_jax_nn():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (Q, K, K + 1))

    def tangent(attention: Any, *arrays: Any) -> np.ndarray:
        return np.asarray(jax.jvp(attention, arrays, arrays)[1], np.float64)

    plain = partial(jax.nn.dot_product_attention, implementation="xla")
    exact = tangent(plain, *(x.astype(jnp.float32) for x in (q, k, v)))
    errors = [np.abs(tangent(f, q, k, v) - exact).max() for f in (dot_product_attention, plain)]
    assert errors[0] <= 2 * errors[1] + 1e-5


@pytest.mark.parametrize("small", [False, True], ids=["one block", "many blocks"])
def test_nan_in_padding_reaches_no_derivative(small, monkeypatch):
    if small:
        make_blocks_small(monkeypatch)
    q, k, v = (x.astype(np.float32) for x in (Q, K, V))
    masked = {**LENGTHS, "is_causal": True}
    real_q = np.arange(5)[:, None, None] < LENGTHS["query_seq_lengths"][:, None, None, None]
    real_k = np.arange(6)[:, None, None] < LENGTHS["key_value_seq_lengths"][:, None, None, None]

    def derivatives(padding: float) -> Any:
        pairs = ((real_q, q), (real_k, k), (real_k, v))
        arrays = tuple(np.where(real, x, np.float32(padding)) for real, x in pairs)

        def loss(*arrays):
            return (dot_product_attention(*arrays, **masked) ** 2).sum()

        def second_order(*arrays):
            return jax.jvp(jax.grad(loss, (0, 1, 2)), arrays, (q, k, v))

        return jax.jvp(loss, arrays, (q, k, v)), jax.jit(second_order)(*arrays)

    for x, y in zip(*(jax.tree.leaves(derivatives(x)) for x in (0.0, np.nan)), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x, y)


def test_derivatives_of_packed_sequences():
    cu_q, cu_kv = np.array([0, 2, 5]), np.array([0, 3, 6])

    @jax.jit
    def attention(q, k, v):
        return ragged_dot_product_attention(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=3, max_seqlen_kv=3
        )

    with jax.enable_x64(True):
        check_grads(attention, (Q[0], K[0], V[0]), order=2, modes=["fwd", "rev"], rtol=1e-5)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_dropout_under_vmap_draws_each_keys_mask_in_every_derivative(impl: str):
    keys = jax.random.split(jax.random.key(5, impl=impl), 3)
    scales = np.array([0.5, 1.0, 2.0], np.float32)

    def loss(scale, key):
        q = scale * Q.astype(np.float32)
        k, v = (x.astype(np.float32) for x in (K, V))
        return (dot_product_attention(q, k, v, dropout_rate=0.5, dropout_key=key) ** 2).sum()

    @jax.jit
    def all_of(scale, key):
        value_and_tangent = jax.jvp(lambda s: loss(s, key), (scale,), (jnp.ones_like(scale),))
        return *value_and_tangent, jax.grad(jax.grad(loss))(scale, key)

    got = jax.vmap(all_of)(scales, keys)
    for i in range(3):
        for x, y in zip(got, all_of(scales[i], keys[i]), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-4)
    np.testing.assert_allclose(got[1], jax.vmap(jax.grad(loss))(scales, keys), rtol=1e-4)


def test_no_tangent_is_computed_for_a_gradient():
    """Reverse mode runs attn_fwd and attn_bwd, and no primitive of forward mode."""
    loss = lambda *x: sum(y.sum() for y in outputs({}, *x))  # noqa: E731
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, range(6)))(*ARRAYS))
    assert jaxpr.count("attn_fwd[") == jaxpr.count("attn_bwd[") == 1
    assert "attn_jvp" not in jaxpr and "attn_by_formula" not in jaxpr
    forward = str(jax.make_jaxpr(lambda *x: jax.jvp(loss, x, x))(*ARRAYS))
    assert forward.count("attn_jvp[") == 1 and "attn_bwd" not in forward


def test_linearize_and_its_transpose_agree_with_jvp_and_vjp():
    def attention(q):
        return dot_product_attention(q, K, V)

    q, out_grad = Q.astype(np.float32), OUT_GRAD.astype(np.float32)
    _, linear = jax.linearize(attention, q)
    np.testing.assert_allclose(linear(q), jax.jvp(attention, (q,), (q,))[1], rtol=1e-5)
    (pulled,) = jax.linear_transpose(linear, q)(out_grad)
    np.testing.assert_array_equal(pulled, jax.vjp(attention, q)[1](out_grad)[0])


def test_attention_is_linear_in_value():
    q, k, v, out_grad = (jnp.asarray(x, jnp.float32) for x in (Q, K, V, OUT_GRAD))
    (got,) = jax.linear_transpose(lambda v: dot_product_attention(q, k, v), v)(out_grad)
    (expected,) = jax.vjp(lambda v: dot_product_attention(q, k, v), v)[1](out_grad)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="linear in value alone, and not in key"):
        jax.linear_transpose(lambda k: dot_product_attention(q, k, v), k)(out_grad)


# Derivatives that no vendor's kernel computes.

X = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)


def jvp(q: jax.Array, **options: Any) -> Any:
    return jax.jvp(lambda q: dot_product_attention(q, q, q, **options), (q,), (q,))


def grad_of_grad(q: jax.Array, **options: Any) -> Any:
    loss = lambda q: dot_product_attention(q, q, q, **options).sum()  # noqa: E731
    return jax.grad(lambda q: jax.grad(loss)(q).sum())(q)


BEYOND_KERNELS = pytest.mark.parametrize(
    ("program", "operation"),
    [(jvp, "forward-mode derivative"), (grad_of_grad, "derivative of a derivative")],
)


def lower(program: Any, platform: str, device: str) -> str:
    with target(device):
        return jax.jit(program).trace(X).lower(lowering_platforms=(platform,)).as_text()


@BEYOND_KERNELS
@pytest.mark.parametrize(
    ("name", "platform", "device"),
    [pytest.param("cudnn", "cuda", "sm90", marks=needs_cudnn), ("aiter", "rocm", "gfx942")],
)
def test_named_kernel_raises_for_other_derivatives(program, operation, name, platform, device):
    with pytest.raises(NotImplementedError) as error:
        lower(partial(program, implementation=name), platform, device)
    assert f"none for a {operation}" in str(error.value)
    assert 'implementation="xla"' in str(error.value)


@BEYOND_KERNELS
@pytest.mark.parametrize(
    ("platform", "device"),
    [pytest.param("cuda", "sm90", marks=needs_cudnn), ("rocm", "gfx942")],
)
def test_xla_computes_the_derivative_by_the_fallback_policy(program, operation, platform, device):
    with pytest.warns(AttentionFallbackWarning, match=operation) as caught:
        lower(program, platform, device)
    assert not any("backward pass" in str(x.message) for x in caught)
    with fallback("error"), pytest.raises(NotImplementedError, match=operation):
        lower(program, platform, device)
    with fallback("silent"):
        lower(program, platform, device)
    # No warning where the caller names XLA.
    lower(partial(program, implementation="xla"), platform, device)


@needs_cudnn
@BEYOND_KERNELS
def test_derivative_under_a_kernels_dropout_mask_raises(program, operation):
    dropping = partial(program, dropout_rate=0.1, dropout_key=jax.random.key(0))
    with pytest.raises(NotImplementedError, match=operation):
        lower(dropping, "cuda", "sm90")
    lower(partial(dropping, implementation="xla"), "cuda", "sm90")
