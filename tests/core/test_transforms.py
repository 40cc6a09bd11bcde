"""The public call under jit, grad, checkpoint, scan and other transformations of JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from attn_dispatch import dot_product_attention
from attn_dispatch.core import select
from tests.support import attention_in_numpy as in_numpy

_rng = np.random.default_rng(0)
Q, K, V, OUT_GRAD = (
    _rng.standard_normal(shape).astype(np.float32)
    for shape in ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 7), (2, 5, 4, 7))
)
BIAS, SINKS = (_rng.standard_normal(shape).astype(np.float32) for shape in ((4, 5, 6), (4,)))

attention = partial(dot_product_attention, is_causal=True)


def loss(q: Any, k: Any, v: Any, bias: Any = BIAS, sinks: Any = SINKS) -> jax.Array:
    return (attention(q, k, v, bias, sinks=sinks) * OUT_GRAD).sum()


def assert_close(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


ALL = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def gradients() -> Any:
    return jax.grad(loss, ALL)(Q, K, V, BIAS, SINKS)


def test_gradients_agree_with_finite_differences():
    check_grads(loss, (Q, K, V, BIAS, SINKS), order=1, modes=["rev"], rtol=2e-2, eps=1e-2)


def test_jit_gives_the_eager_results(gradients):
    assert_close(jax.jit(attention)(Q, K, V), attention(Q, K, V))
    assert_close(jax.jit(jax.grad(loss, ALL))(Q, K, V, BIAS, SINKS), gradients)
    assert_close(jax.grad(jax.jit(loss), ALL)(Q, K, V, BIAS, SINKS), gradients)


@pytest.mark.parametrize("names", [(0,), (1,), (2,), (3,), (4,), (0, 2), (1, 3, 4)], ids=str)
def test_gradients_of_some_operands(names: tuple[int, ...], gradients):
    """The backward call names the differentiated operands and computes no other gradients."""
    some = jax.grad(loss, names)
    assert_close(some(Q, K, V, BIAS, SINKS), tuple(gradients[i] for i in names))
    jaxpr = str(jax.make_jaxpr(some)(Q, K, V, BIAS, SINKS))
    order = ("query", "key", "value", "bias", "sinks")
    wanted = tuple(order[i] for i in names)
    assert f"gradients={wanted}" in jaxpr
    assert jaxpr.count("attn_bwd[") == 1 and jaxpr.count("attn_fwd[") == 1


def test_no_backward_pass_without_a_gradient():
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: x * loss(Q, K, V)))(1.0))
    assert "attn_bwd" not in jaxpr and "attn_fwd" in jaxpr


def test_inference_computes_no_lse():
    assert "needs_lse=False" in str(jax.make_jaxpr(attention)(Q, K, V))
    assert "needs_lse=True" in str(jax.make_jaxpr(jax.grad(loss))(Q, K, V))


def test_lse_is_differentiable_and_residual_is_not():
    def lse_of(q, k):
        return attention(q, k, V, return_lse=True)[1].sum()

    def plain(q, k):  # by definition; query heads 0 and 1 use key head 0
        score = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, 2, axis=2)) / np.sqrt(8)
        score = jnp.where(np.tril(np.ones((5, 6), bool)), score, -jnp.inf)
        return jax.nn.logsumexp(score, axis=-1).sum()

    got = jax.value_and_grad(lse_of, (0, 1))(Q, K)
    assert_close(got, jax.value_and_grad(plain, (0, 1))(Q, K))

    def residual_of(q, k):
        return attention(q, k, V, return_residual=True)[1].sum()

    value, zeros = jax.value_and_grad(residual_of, (0, 1))(Q, K)
    assert_close(value, got[0])
    assert not np.any(zeros[0]) and not np.any(zeros[1])


def test_value_and_grad_of_out_and_lse_together():
    def both(q, k, v):
        out, lse = attention(q, k, v, return_lse=True)
        return (out * OUT_GRAD).sum() + (lse**2).sum(), (out, lse)

    (value, (out, lse)), got = jax.value_and_grad(both, (0, 1, 2), has_aux=True)(Q, K, V)
    assert_close((out, lse), attention(Q, K, V, return_lse=True))
    assert_close(value, (out * OUT_GRAD).sum() + (lse**2).sum())
    # The gradient is linear in the cotangents of out and lse.
    of_out = jax.grad(lambda *x: (attention(*x) * OUT_GRAD).sum(), (0, 1, 2))(Q, K, V)
    of_lse = jax.grad(lambda *x: (attention(*x, return_lse=True)[1] ** 2).sum(), (0, 1, 2))(Q, K, V)
    assert_close(got, tuple(x + y for x, y in zip(of_out, of_lse, strict=True)))
    assert not np.any(of_lse[2]) and np.any(of_lse[0])


def test_checkpoint_computes_the_forward_pass_again(gradients):
    recomputed = jax.grad(jax.checkpoint(loss), ALL)
    assert_close(recomputed(Q, K, V, BIAS, SINKS), gradients)
    # The gradient computes the forward pass a second time instead of saving its results.
    assert str(jax.make_jaxpr(recomputed)(Q, K, V, BIAS, SINKS)).count("attn_fwd[") == 2


def test_checkpoint_and_scan_with_dropout_draw_the_same_mask_twice():
    def layer(x, key):
        return x + dot_product_attention(x, x, x, dropout_rate=0.5, dropout_key=key), None

    def scanned(x, keys, layer=layer):
        return (jax.lax.scan(layer, x, keys)[0] ** 2).sum()

    def looped(x, keys):
        for key in keys:
            x, _ = layer(x, key)
        return (x**2).sum()

    keys = jax.random.split(jax.random.key(1), 2)
    expected = jax.grad(looped)(Q / 2, keys)
    for run in (scanned, partial(scanned, layer=jax.checkpoint(layer))):
        got = jax.jit(jax.grad(run))(Q / 2, keys)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_scan_over_layers_has_the_gradients_of_a_loop():
    """One call in a scan serves all layers, and the scan is differentiated."""
    weights = _rng.standard_normal((3, 8, 8)).astype(np.float32) / 4

    def layer(x, w):
        return x + attention(x @ w, x, x), None

    def scanned(x, weights):
        return (jax.lax.scan(layer, x, weights)[0] ** 2).sum()

    def looped(x, weights):
        for w in weights:
            x, _ = layer(x, w)
        return (x**2).sum()

    x = Q / 2
    got = jax.jit(jax.value_and_grad(scanned, (0, 1)))(x, weights)
    expected = jax.value_and_grad(looped, (0, 1))(x, weights)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_eval_shape_of_calls_too_large_to_run():
    q = jax.ShapeDtypeStruct((3, 2, 100_000, 32, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((3, 2, 200_000, 4, 64), jnp.bfloat16)
    out, lse = jax.eval_shape(partial(attention, return_lse=True), q, kv, kv)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:-1], "float32")
    grads = jax.eval_shape(
        jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), (0, 1, 2)), q, kv, kv
    )
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, kv, kv)]


def test_donated_query_is_deleted():
    x = _rng.standard_normal((2, 5, 4, 8)).astype(np.float32)
    expected = np.asarray(attention(x, x, x))
    donated = jnp.asarray(x)
    step = jax.jit(lambda q, k, v: attention(q, k, v), donate_argnums=0)
    assert_close(step(donated, jnp.asarray(x), jnp.asarray(x)), expected)
    assert donated.is_deleted()


def test_vjp_function_can_be_called_twice(gradients):
    _, pull = jax.vjp(lambda *x: attention(*x[:3], x[3], sinks=x[4]), Q, K, V, BIAS, SINKS)
    assert_close(pull(OUT_GRAD), gradients)
    assert_close(pull(2 * OUT_GRAD), tuple(2 * x for x in gradients))


def test_equal_calls_share_one_compilation(monkeypatch):
    lowered = []
    choose = select.choose
    monkeypatch.setattr(select, "choose", lambda *x: lowered.append(x) or choose(*x))
    for _ in range(3):
        attention(Q, K, V, scale=0.123)
    attention(Q + 1, K, V, scale=0.123)
    assert len(lowered) == 1


def test_float64_results_and_gradients():
    with jax.enable_x64(True):
        q, k, v = (np.asarray(x, np.float64) for x in (Q, K, V))
        out, lse = attention(q, k, v, return_lse=True)
        assert (out.dtype, lse.dtype) == ("float64", "float64")
        score = in_numpy.across(q, k) / np.sqrt(8)
        weights, expected_lse = in_numpy.softmax(np.where(np.tri(5, 6, dtype=bool), score, -np.inf))
        np.testing.assert_allclose(out, in_numpy.applied(weights, v), rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(lse, expected_lse.swapaxes(1, 2), rtol=1e-13, atol=1e-14)
        check_grads(lambda *x: attention(*x), (q, k, v), order=1, modes=["rev"], rtol=1e-6)
        gradients = jax.grad(lambda *x: attention(*x).sum(), (0, 1, 2))(q, k, v)
        assert {x.dtype.name for x in gradients} == {"float64"}
        # Other dtypes give the same result dtypes as without x64.
        out, lse = attention(Q, K, V, return_lse=True)
        assert (out.dtype, lse.dtype) == ("float32", "float32")


def test_64_bit_lengths_are_not_truncated():
    """Truncated to 32 bits, 2^32 + 1 would be the valid length 1."""
    with jax.enable_x64(True):

        @jax.jit
        def call(lengths):
            return attention(Q, K, V, query_seq_lengths=lengths, key_value_seq_lengths=lengths)

        for large in (np.array([2**32 + 1, 2]), np.array([2**63 + 2, 2], np.uint64)):
            assert np.isnan(call(large)[0]).all()
            np.testing.assert_array_equal(call(large)[1], call(np.array([5, 2]))[1])


@pytest.mark.parametrize("options", [{}, {"local_window_size": 1}, {"sinks": SINKS}], ids=str)
def test_nan_in_a_bias_reaches_the_results(options: dict[str, Any]):
    """A row whose biases are NaN does not count as a row without keys, which would give 0."""
    bias = BIAS.copy()
    bias[1, 2] = np.nan
    out, lse = attention(Q, K, V, bias, return_lse=True, **options)
    expected = np.zeros(out.shape[1:3], bool)
    expected[2, 1] = True
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1)[0], expected)
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1)[1], expected)
    np.testing.assert_array_equal(np.isnan(lse)[0], expected)


def test_vmap_with_several_batch_dims():
    shapes = [(2, 3, *x.shape) for x in (Q, K, V)]  # one mapped dim and two batch dims
    q, k, v = (_rng.standard_normal(shape).astype(np.float32) for shape in shapes)

    def call(q, k, v):
        return attention(q, k, v, BIAS, sinks=SINKS)

    expected = np.stack(
        [[call(*x) for x in zip(*y, strict=True)] for y in zip(q, k, v, strict=True)]
    )
    assert_close(np.asarray(jax.vmap(call)(q, k, v)), expected)
    assert_close(np.asarray(jax.vmap(jax.vmap(call))(q, k, v)), expected)
    assert_close(np.asarray(jax.jit(jax.vmap(call, 1, 1))(q, k, v)), expected)
    shared = np.asarray(jax.vmap(call, (1, None, None), 1)(q, k[:, 0], v[:, 0]))
    assert_close(shared[:, 2], np.asarray(call(q[:, 2], k[:, 0], v[:, 0])))

    def squares(q, k, v):
        return (call(q, k, v) ** 2).sum()

    whole = jax.grad(squares, (0, 1, 2))(q, k, v)
    assert_close(jax.vmap(jax.vmap(jax.grad(squares, (0, 1, 2))))(q, k, v), whole)
    assert_close(jax.grad(lambda *x: jax.vmap(squares)(*x).sum(), (0, 1, 2))(q, k, v), whole)
