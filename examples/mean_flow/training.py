"""MeanFlow's loss (Geng et al. 2025, arxiv.org/abs/2505.13447), and steps that lower it."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .model import Attention, Config, Params, initial, velocity


def loss(
    params: Params, x: jax.Array, key: jax.Array, config: Config, attention: Attention
) -> jax.Array:
    """The mean square difference of the model's velocity from the one that MeanFlow wants.

    On the line z = (1 - t) x + t noise, with the velocity v, the mean velocity u from t back to r
    has u = v - (t - r) du/dt. So the derivative of u along the line is a part of its own goal,
    which has no gradient.
    """
    for_noise, for_times, for_equal = jax.random.split(key, 3)
    noise = jax.random.normal(for_noise, x.shape)
    r, t = jnp.sort(jax.nn.sigmoid(jax.random.normal(for_times, (2, len(x))) - 0.4), axis=0)
    r = jnp.where(jax.random.bernoulli(for_equal, 0.75, r.shape), t, r)
    at, v = t[:, None, None], noise - x
    u, moved = jax.jvp(
        lambda z, r, t: velocity(params, z, r, t, config, attention),
        ((1 - at) * x + at * noise, r, t),
        (v, jnp.zeros_like(r), jnp.ones_like(t)),
    )
    wanted = v - (t - r)[:, None, None] * moved
    return ((u - jax.lax.stop_gradient(wanted)) ** 2).mean()


def waves(key: jax.Array, batch: int, config: Config) -> jax.Array:
    """Data: a wave of a random length and phase over the tokens, in each channel."""
    for_phase, for_length = jax.random.split(key)
    phase = jax.random.uniform(for_phase, (batch, 1, config.channels))
    count = jax.random.randint(for_length, (batch, 1, 1), 1, 4)
    places = jnp.linspace(0, 1, config.tokens)[:, None]
    return jnp.sin(2 * jnp.pi * (count * places + phase))


def train(
    config: Config, batch: int, attention: Attention, *, steps: int, rate: float, seed: int = 0
) -> Iterator[tuple[float, float]]:
    """The loss of each step, and the steps per second so far; the first step, which compiles, does
    not count."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: dict[str, Any], number: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        for_data, for_loss = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        x = waves(for_data, batch, config)
        value, grads = jax.value_and_grad(loss)(state["params"], x, for_loss, config, attention)
        return _adam(state, grads, number + 1, rate), value

    params = initial(config, jax.random.key(seed))
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"params": params, "mean": zeros, "square": jax.tree.map(jnp.copy, zeros)}
    began = 0.0
    for number in range(steps):
        state, value = step(state, jnp.int32(number))
        found = float(value)  # waits for the step
        began = began or time.perf_counter()
        yield found, number / max(time.perf_counter() - began, 1e-9)


def _adam(state: dict[str, Any], grads: Params, count: jax.Array, rate: float) -> dict[str, Any]:
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g**2, state["square"], grads)

    def moved(x: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return x - rate * (m / (1 - 0.9**count)) / (jnp.sqrt(s / (1 - 0.95**count)) + 1e-8)

    return {
        "params": jax.tree.map(moved, state["params"], mean, square),
        "mean": mean,
        "square": square,
    }
