"""The layers against attention as a matrix of scores, and a few steps of training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .layers import GLOBAL, LOCAL, Kind, attention, drawn_parameters, normalised, trained

WIDTH, LENGTH = 32, 20
SHORT = Kind(LOCAL.head_dim, window=4)


def reference(x, parameters, kind):
    q, k, v = (jnp.einsum("btw,wnh->btnh", x, parameters[y]) for y in ("query", "key", "value"))
    q, k = normalised(q) * kind.head_dim**-0.5, normalised(k)
    k, v = (jnp.repeat(y, kind.heads // kind.kv_heads, axis=2) for y in (k, v))
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    sees = (distance >= 0) & (kind.window is None or distance <= kind.window)
    scores = jnp.where(sees, jnp.einsum("btnh,bsnh->bnts", q, k), -jnp.inf)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    return jnp.einsum("btnh,nhw->btw", out, parameters["out"])


@pytest.mark.parametrize("kind", [SHORT, GLOBAL], ids=["local", "global"])
def test_a_layer_and_its_gradients_agree_with_a_matrix_of_scores(kind):
    (parameters,) = drawn_parameters(0, (kind,), WIDTH)
    x, weight = (jax.random.normal(jax.random.key(i), (2, LENGTH, WIDTH)) for i in range(2))

    def results(function):
        def loss(parameters, x):
            return (function(x, parameters, kind) * weight).sum()

        return function(x, parameters, kind), jax.grad(loss, (0, 1))(parameters, x)

    found, expected = (jax.tree.leaves(results(y)) for y in (attention, reference))
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)


def test_training_lowers_the_loss():
    stack = (SHORT, GLOBAL)
    x, goal = (jax.random.normal(jax.random.key(i), (1, LENGTH, WIDTH)) for i in range(2))
    _, losses = trained(drawn_parameters(0, stack, WIDTH), stack, x, goal, steps=4)
    assert losses[-1] < losses[0]
