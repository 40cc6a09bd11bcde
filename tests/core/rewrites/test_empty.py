"""Calls with an axis of length zero give the results of the formula instead of an error."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention

_EMPTY: tuple[dict[str, int], ...] = (
    {"b": 0}, {"t": 0}, {"s": 0}, {"n": 0}, {"n": 0, "k": 0}, {"h": 0}, {"v": 0},
    {"b": 0, "t": 0, "s": 0, "n": 0, "k": 0, "h": 0, "v": 0},
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


def arrays(*, b=2, t=3, s=4, n=2, k=1, h=8, v=6) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, v))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def results(*operands: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    return dot_product_attention(*operands, return_lse=True, **options)


def expected_results(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The results in closed form; only with head dim 0 are they not constants."""
    b, t, n, _ = q.shape
    s, groups = k.shape[1], n // max(k.shape[2], 1)
    out, lse = np.zeros((b, t, n, v.shape[3]), np.float32), np.zeros((b, t, n), np.float32)
    if not s:
        return out, lse - np.inf
    # Scores over no dims are all 0.
    mean = v.mean(axis=1, keepdims=True).repeat(groups, axis=2) if n else out[:, :1]
    return out + mean, lse + np.log(s).astype(np.float32)


@pytest.mark.parametrize("dims", [d for d in _EMPTY if d != {"v": 0}], ids=str)
def test_results_of_empty_calls_follow_the_formula(dims: dict[str, int]):
    operands = arrays(**dims)
    for got, expected in zip(results(*operands), expected_results(*operands), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_lse_without_value_dims():
    q, k, v = arrays()
    out, lse = results(q, k, v[..., :0])
    assert out.shape == (2, 3, 2, 0)
    np.testing.assert_allclose(lse, results(q, k, v)[1], rtol=1e-6)


@pytest.mark.parametrize("dims", _EMPTY, ids=str)
def test_gradients_of_empty_calls_follow_the_formula(dims: dict[str, int]):
    operands = [jnp.asarray(x) for x in arrays(**dims)]
    got = jax.grad(lambda *x: results(*x)[0].sum(), argnums=(0, 1, 2))(*operands)
    assert [x.shape for x in got] == [x.shape for x in operands]
    for x in got[:2]:
        assert not np.any(x)
    # With head dim 0 every key of a row has the same probability.
    spread = 2 * 3 / 4 if dims == {"h": 0} else 0
    np.testing.assert_allclose(got[2], np.full(got[2].shape, spread), rtol=1e-6)


def test_no_keys_with_every_operand_gives_zeros():
    q, k, v = (jnp.asarray(x) for x in arrays(s=0))
    options: dict[str, Any] = {
        "bias": jnp.zeros((1, 2, 3, 0)), "mask": jnp.ones((2, 1, 3, 0), bool), "is_causal": True,
        "key_value_seq_lengths": [0, 0], "alibi_slopes": jnp.ones(2), "dropout_rate": 0.5,
        "dropout_key": jax.random.key(0),
    }  # fmt: skip

    def both(q, bias, alibi_slopes, sinks):
        more = options | {"bias": bias, "alibi_slopes": alibi_slopes}
        out, lse = results(q, k, v, sinks=sinks, **more)
        return out.sum() + jnp.where(lse == -jnp.inf, 0, lse).sum(), (out, lse)

    operands = (q, options["bias"], options["alibi_slopes"], jnp.ones(2))
    gradients, (out, lse) = jax.grad(both, argnums=(0, 1, 2, 3), has_aux=True)(*operands)
    # A row without keys gives 0 and -inf, whatever its sink.
    assert not np.any(out) and np.all(np.asarray(lse) == -np.inf)
    for gradient, operand in zip(gradients, operands, strict=True):
        assert gradient.shape == operand.shape and not np.any(gradient)


def test_empty_calls_under_jit_and_vmap():
    q, k, v = arrays(s=0)
    out, lse = jax.jit(jax.vmap(results))(q, k, v)
    assert not np.any(out) and np.all(np.asarray(lse) == -np.inf)
    empty_vmap = jax.vmap(results)(*arrays(b=0))[0]
    assert empty_vmap.shape == (0, 3, 2, 6)
