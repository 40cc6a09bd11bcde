"""A small diffusion transformer: the mean velocity of tokens between two times."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    tokens: int
    channels: int
    """How many numbers a token has."""
    width: int
    heads: int
    layers: int
    dtype: str = "bfloat16"
    """The dtype of activations; parameters are float32."""


def initial(config: Config, key: jax.Array) -> Params:
    """Random parameters. Blocks have one array for all layers, which `velocity` scans."""
    width, keys = config.width, iter(jax.random.split(key, 9))

    def drawn(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

    layers = config.layers
    return {
        "in": drawn(config.channels, width),
        "place": 0.02 * jax.random.normal(next(keys), (config.tokens, width)),
        "time": drawn(2 * width, width),
        "blocks": {
            # Blocks begin as the identity: their gates are 0.
            "modulation": jnp.zeros((layers, width, 6 * width)),
            "qkv": drawn(layers, width, 3 * width),
            "mixed": drawn(layers, width, width),
            "up": drawn(layers, width, 4 * width),
            "down": drawn(layers, 4 * width, width),
        },
        "out": jnp.zeros((width, config.channels)),
    }


def velocity(
    params: Params, z: jax.Array, r: jax.Array, t: jax.Array, config: Config, attention: Attention
) -> jax.Array:
    """The mean velocity from time t back to time r, of tokens z [B, tokens, channels] at t."""
    dtype = jnp.dtype(config.dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    times = jnp.concatenate([_embedded(t, config.width), _embedded(t - r, config.width)], axis=-1)
    condition = jax.nn.silu(times.astype(dtype) @ params["time"])

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        parts = (condition @ layer["modulation"])[:, None]
        scale, shift, gate, scale_2, shift_2, gate_2 = jnp.split(parts, 6, axis=-1)
        qkv = (_normal(x) * (1 + scale) + shift) @ layer["qkv"]
        heads = qkv.reshape(*x.shape[:2], 3, config.heads, -1)
        mixed = attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2])
        x = x + gate * (mixed.reshape(x.shape) @ layer["mixed"])
        inner = jax.nn.gelu((_normal(x) * (1 + scale_2) + shift_2) @ layer["up"])
        return x + gate_2 * (inner @ layer["down"]), None

    x = z.astype(dtype) @ params["in"] + params["place"]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return (_normal(x) @ params["out"]).astype(jnp.float32)


def _embedded(time: jax.Array, width: int) -> jax.Array:
    """Sines and cosines of times [B], slow ones: their derivatives are a part of the loss."""
    frequencies = jnp.exp(-math.log(100) * jnp.arange(width // 2) / (width // 2))
    angles = 4 * time[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _normal(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
