"""A training step of a small model with grouped attention, its weights sharded or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch

B, T, D, N, H, VOCABULARY, LAYERS = 8, 32, 32, 8, 8, 64, 2

Weights = dict[str, Any]


def weights(kv_heads: int) -> Weights:
    rng = np.random.default_rng(0)
    shapes = {
        "q": (LAYERS, D, N, H), "k": (LAYERS, D, kv_heads, H), "v": (LAYERS, D, kv_heads, H),
        "o": (LAYERS, N, H, D), "up": (LAYERS, D, 2 * D), "down": (LAYERS, 2 * D, D),
        "embed": (VOCABULARY, D),
    }  # fmt: skip
    return {
        name: (rng.standard_normal(shape) / np.sqrt(D)).astype(np.float32)
        for name, shape in shapes.items()
    }


def weight_specs(tensor: Any, kv_tensor: Any) -> dict[str, P]:
    return {
        "q": P(None, None, tensor), "k": P(None, None, kv_tensor), "v": P(None, None, kv_tensor),
        "o": P(None, tensor), "up": P(None, None, tensor), "down": P(None, tensor), "embed": P(),
    }  # fmt: skip


def loss(weights: Weights, tokens: jax.Array, batch: Any, *, is_explicit: bool) -> jax.Array:
    def rows(equation: str, *operands: jax.Array) -> jax.Array:
        """A product whose result is sharded over the batch alone."""
        if is_explicit:
            return jnp.einsum(equation, *operands, out_sharding=P(batch))
        return jnp.einsum(equation, *operands)

    def layer(x: jax.Array, w: Weights) -> tuple[jax.Array, None]:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[name]) for name in "qkv")
        out = attn_dispatch.dot_product_attention(q, k, v, is_causal=True)
        x = x + rows("btnh,nhd->btd", out, w["o"])
        hidden = jax.nn.silu(jnp.einsum("btd,df->btf", x, w["up"]))
        return x + rows("btf,fd->btd", hidden, w["down"]), None

    embed = weights["embed"]
    x = rows("btw,wd->btd", jax.nn.one_hot(tokens, VOCABULARY), embed)
    layers = {name: w for name, w in weights.items() if name != "embed"}
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, layers)
    scores = jax.nn.log_softmax(jnp.einsum("btd,wd->btw", x, embed))
    wanted = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), VOCABULARY)
    return -(scores * wanted).sum() / tokens.size


def losses(kv_heads: int, mesh: Any = None, batch: Any = None, tensor: Any = None) -> list[float]:
    """The loss before each of three steps of gradient descent."""
    given = weights(kv_heads)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (B, T))
    is_explicit = mesh is not None and AxisType.Explicit in mesh.axis_types

    @jax.jit
    def train(weights: Weights, tokens: jax.Array) -> tuple[jax.Array, Weights]:
        value, gradients = jax.value_and_grad(loss)(weights, tokens, batch, is_explicit=is_explicit)
        return value, jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients)

    def run(given: Weights, tokens: Any) -> list[float]:
        found = []
        for _ in range(3):
            value, given = train(given, tokens)
            found.append(float(value))
        return found

    if mesh is None:
        return run(given, tokens)
    kv_tensor = tensor if tensor and kv_heads % mesh.shape[tensor] == 0 else None
    specs = weight_specs(tensor, kv_tensor)
    with jax.set_mesh(mesh):
        placed = {x: jax.device_put(w, NamedSharding(mesh, specs[x])) for x, w in given.items()}
        return run(placed, jax.device_put(tokens, NamedSharding(mesh, P(batch))))
