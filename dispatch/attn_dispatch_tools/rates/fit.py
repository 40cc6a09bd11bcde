"""Fits the rates of a device to measured times, by gradient descent on their logarithms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.core.choice.rates import Rate
from attn_dispatch.core.choice.time_model import SHARPNESS
from attn_dispatch.core.choice.work import HEAD_DIMS, TRAITS
from attn_dispatch_tools.rates.observations import NAMES, Observations

Parameters = dict[str, jax.Array]
"""Logarithms of rates by field, [implementation, pass] or with an axis of dims or traits."""

_STEPS, _LEARNING_RATE = 5000, 0.03
_PRIOR = 2e-5
"""The weight of the distance from the rates that the fit starts from."""
_BEND = 0.1
"""Errors of a logarithm above this count linearly, so that a wrong measurement weighs little."""
_SHARED = 0.2
"""The weight of the error itself, beside that relative to other implementations of the call."""
_LEAST_WEIGHT = 0.3
_TINY = -3.0
"""The logarithm of an addition of 0.05 us or 5 %, from which those of traits start."""

_TILE = {"64": 0.35, "96": 0.5, "128": 0.6, "192/128": 0.8, "192": 0.9, "256": 1.2, "384": 2.0,
         "512": 3.0, "more": 4.0}  # fmt: skip
"""Where the microseconds of a tile start, for the forward pass; the backward pass takes 2.5 times
as long."""


def neutral() -> Parameters:
    """Rates from which a fit without a similar device starts."""
    shape = (len(NAMES), 2)
    traits = (*shape, len(TRAITS))
    tile = jnp.log(jnp.array([_TILE[x] for x in HEAD_DIMS], jnp.float32))
    return {
        "host": jnp.full(shape, jnp.log(35.0)),
        "start": jnp.full(shape, jnp.log(5.0)),
        "path": jnp.full(shape, -1.0),
        "wave": jnp.full(shape, -1.0),
        "block": jnp.full(shape, -2.0),
        "megabyte": jnp.full(shape, jnp.log(0.5)),
        "pair_megabyte": jnp.full(shape, jnp.log(0.3)),
        "tile": jnp.broadcast_to(tile, (*shape, len(HEAD_DIMS))) + jnp.array([[[0.0], [0.9]]]),
        "host_times": jnp.zeros(traits),
        "start_plus": jnp.full(traits, -1.0),
        "tile_times": jnp.zeros(traits),
        "path_times": jnp.zeros(traits),
        "megabyte_plus": jnp.full(traits, _TINY),
    }


def _pass_times(
    p: Parameters, x: Mapping[str, jax.Array], index: int
) -> tuple[jax.Array, jax.Array]:
    """The times of host and device for the forward (0) or backward (1) pass of each row."""
    name, traits = x["name"], x["traits"][:, index]

    def of(field: str) -> jax.Array:
        return p[field][name, index]

    host = jnp.exp(of("host") + (of("host_times") * traits).sum(-1))
    tile = of("tile")[jnp.arange(len(name)), x["dims"][:, index]]
    tile = jnp.exp(tile + (of("tile_times") * traits).sum(-1))
    path = jnp.exp(of("path") + (of("path_times") * traits).sum(-1))
    tiles = x["tiles"][:, index] + path * x["longest"][:, index]
    tiles += jnp.exp(of("wave")) * x["wave"][:, index]
    tiles += jnp.exp(of("block")) * x["blocks"][:, index]
    of_bytes = 1 + (jnp.exp(of("megabyte_plus")) * traits).sum(-1)
    device = jnp.exp(of("start")) + (jnp.exp(of("start_plus")) * traits).sum(-1) + tile * tiles
    device += jnp.exp(of("megabyte")) * x["megabytes"][:, index] * of_bytes
    device += jnp.exp(of("pair_megabyte")) * x["pair_megabytes"][:, index]
    return host, device


def predictions(p: Parameters, x: Mapping[str, jax.Array]) -> jax.Array:
    """The modelled time of each row."""
    host, device = _pass_times(p, x, 0)
    others = _pass_times(p, x, 1)
    host, device = host + x["is_step"] * others[0], device + x["is_step"] * others[1]
    wall = (host**SHARPNESS + device**SHARPNESS) ** (1 / SHARPNESS)
    return jnp.where(x["is_device"] > 0, device, wall)


def _loss(p: Parameters, prior: Parameters, x: Mapping[str, jax.Array]) -> jax.Array:
    """The error of the choice: an error that all implementations of a call share changes none.

    An implementation that is much slower than the best one is not chosen whatever its error.
    """
    error = jnp.log(predictions(p, x) / x["time"])
    count = x["group"].shape[0]
    best = jax.ops.segment_min(x["time"], x["group"], count)[x["group"]]
    weight = jnp.maximum((best / x["time"]) ** 2, _LEAST_WEIGHT)
    total = jax.ops.segment_sum(weight, x["group"], count)
    shared = jax.ops.segment_sum(weight * error, x["group"], count) / jnp.maximum(total, 1e-6)
    own = error - shared[x["group"]]
    distance = sum(((p[k] - prior[k]) ** 2).sum() for k in p)
    both = _bent(own) + _SHARED * _bent(error)
    return (weight * both).sum() / weight.sum() + _PRIOR * distance


def _bent(error: jax.Array) -> jax.Array:
    size = jnp.abs(error)
    return jnp.where(size < _BEND, size**2 / (2 * _BEND), size - _BEND / 2)


def fitted(found: Observations, prior: Parameters | None = None, steps: int = _STEPS) -> Parameters:
    """The rates that are nearest to the measured times, and to the rates it starts from."""
    start = neutral() if prior is None else prior
    x = {key: jnp.asarray(value) for key, value in found.arrays().items()}

    def step(i: jax.Array, state: tuple[Parameters, ...]) -> tuple[Parameters, ...]:
        # Adam (arXiv:1412.6980), with a learning rate that falls to nothing.
        p, mean, square = state
        gradient = jax.grad(partial(_loss, prior=start, x=x))(p)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, square, gradient)
        rate = _LEARNING_RATE * jnp.minimum(1.0, 4 * (1 - i / steps))
        ones = 1 - 0.9 ** (i + 1.0), 1 - 0.999 ** (i + 1.0)
        p = jax.tree.map(
            lambda p, m, v: p - rate * (m / ones[0]) / (jnp.sqrt(v / ones[1]) + 1e-8),
            p, mean, square,
        )  # fmt: skip
        return p, mean, square

    zeros = jax.tree.map(jnp.zeros_like, start)
    return jax.jit(lambda s: jax.lax.fori_loop(0, steps, step, s))((start, zeros, zeros))[0]


def as_rates(p: Parameters, found: Observations) -> dict[tuple[str, str], Rate]:
    """The rates of a fit, of the implementations, head dims and traits that were measured."""
    rates: dict[tuple[str, str], Rate] = {}
    for i, name in enumerate(NAMES):
        for j, direction in enumerate(("forward", "backward")):
            rows = (found.name == i) & ((found.is_step > 0) if j else True)
            if not rows.any():
                continue
            value = {key: np.exp(np.asarray(x[i, j], np.float64)) for key, x in p.items()}
            dims = sorted(set(found.dims[rows, j].tolist()))
            traits = np.flatnonzero(found.traits[rows, j].any(0)).tolist()

            def some(key: str, least: float, neutral: float, value=value, traits=traits):
                named = {TRAITS[k]: _rounded(value[key][k]) for k in traits}
                return {k: x for k, x in named.items() if abs(x - neutral) > least}

            rates[name, direction] = Rate(
                **{k: _rounded(x) for k, x in value.items() if np.ndim(x) == 0},
                traits=tuple(TRAITS[k] for k in traits),
                tile={HEAD_DIMS[k]: _rounded(value["tile"][k]) for k in dims},
                host_times=some("host_times", 0.01, 1.0),
                start_plus=some("start_plus", 0.2, 0.0),
                tile_times=some("tile_times", 0.01, 1.0),
                path_times=some("path_times", 0.05, 1.0),
                megabyte_plus=some("megabyte_plus", 0.02, 0.0),
            )
    return rates


def parameters_of(rates: Mapping[tuple[str, str], Rate]) -> Parameters:
    """The parameters of known rates: where the fit of a similar device starts."""
    p = {key: np.array(x) for key, x in neutral().items()}
    for (name, direction), rate in rates.items():
        if name not in NAMES:
            continue
        at = NAMES.index(name), ("forward", "backward").index(direction)
        for key, value in rate.to_json().items():
            if isinstance(value, dict):
                places = HEAD_DIMS if key == "tile" else TRAITS
                for k, number in value.items():
                    p[key][(*at, places.index(k))] = np.log(max(number, 1e-6))
            elif key != "traits":
                p[key][at] = np.log(max(value, 1e-6))
    return {key: jnp.asarray(x) for key, x in p.items()}


def _rounded(x: SupportsFloat) -> float:
    return float(f"{float(x):.3g}")
