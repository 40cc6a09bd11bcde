"""MeanFlow's loss falls, and both attentions have the same losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import dot_product_attention, fallback

from .__main__ import SIZES, main
from .model import initial, velocity
from .training import loss, waves

CONFIG, BATCH = SIZES["tiny"]


@pytest.fixture(autouse=True)
def _no_warning_of_formulas():
    with fallback("silent"):
        yield


def test_losses_fall_and_do_not_depend_on_who_computes_attention():
    arguments = ["--size", "tiny", "--steps", "80", "--rate", "3e-3"]
    ours, theirs = (main([*arguments, "--attention", x]) for x in ("attn_dispatch", "jax.nn"))
    assert np.mean(ours[-10:]) < 0.85 * np.mean(ours[:3])
    np.testing.assert_allclose(ours[:10], theirs[:10], rtol=1e-3)


def test_the_goal_has_the_tangent_and_no_gradient():
    """The loss agrees with one whose derivative along the line is a difference."""
    drawn = initial(CONFIG, jax.random.key(0))
    leaves, tree = jax.tree.flatten(drawn)
    # Gates and the last matrix are 0 at first, and with them every tangent.
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.05 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    params, key = jax.tree.unflatten(tree, moved), jax.random.key(2)
    x = waves(jax.random.key(3), BATCH, CONFIG)

    def by_difference(params, goal_params):
        for_noise, for_times, for_equal = jax.random.split(key, 3)
        noise = jax.random.normal(for_noise, x.shape)
        r, t = jnp.sort(jax.nn.sigmoid(jax.random.normal(for_times, (2, BATCH)) - 0.4), axis=0)
        r = jnp.where(jax.random.bernoulli(for_equal, 0.75, r.shape), t, r)

        def u(params, shift):
            now = (t + shift)[:, None, None]
            z = (1 - now) * x + now * noise
            return velocity(params, z, r, t + shift, CONFIG, jax.nn.dot_product_attention)

        step = 1e-2
        moved = (u(goal_params, step) - u(goal_params, -step)) / (2 * step)
        return ((u(params, 0) - (noise - x - (t - r)[:, None, None] * moved)) ** 2).mean()

    ours = jax.value_and_grad(loss)(params, x, key, CONFIG, dot_product_attention)
    expected = jax.value_and_grad(by_difference)(params, params)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())
