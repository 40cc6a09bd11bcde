"""Layers of two kinds, as in Gemma 4: local ones with a window and heads of 256, and global ones
with heads of 512.

    python -m examples.gemma_layers.layers

trains a small stack for a few steps, and prints what computes the attention of each kind here. On
an H100, after `attn-dispatch build-fa4`, both passes of global layers run on kernels too; without
it, cuDNN or XLA runs the forward pass, and XLA the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch import dot_product_attention, explain

Parameters = dict[str, jax.Array]


@dataclass(frozen=True)
class Kind:
    """The attention of a layer."""

    head_dim: int
    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    """How many tokens before itself a token sees; None: all."""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of dot_product_attention."""
        window = None if self.window is None else (self.window, 0)
        return {"is_causal": True, "local_window_size": window}


LOCAL, GLOBAL = Kind(256, window=1024), Kind(512, kv_heads=1)
STACK = (LOCAL, LOCAL, LOCAL, LOCAL, LOCAL, GLOBAL)


def drawn_parameters(seed: int, stack: tuple[Kind, ...], width: int) -> list[Parameters]:
    def one(key: jax.Array, kind: Kind) -> Parameters:
        shapes = {
            "query": (width, kind.heads, kind.head_dim),
            "key": (width, kind.kv_heads, kind.head_dim),
            "value": (width, kind.kv_heads, kind.head_dim),
            "out": (kind.heads, kind.head_dim, width),
        }
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(k, shape) / math.sqrt(math.prod(shape) / shape[-1])
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    keys = jax.random.split(jax.random.key(seed), len(stack))
    return [one(key, kind) for key, kind in zip(keys, stack, strict=True)]


def normalised(x: jax.Array) -> jax.Array:
    scale = jax.lax.rsqrt(jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6)
    return (x * scale).astype(x.dtype)


def attention(x: jax.Array, parameters: Parameters, kind: Kind) -> jax.Array:
    """What a layer adds to x [B, T, width]."""
    q, k, v = (
        jnp.einsum("btw,wnh->btnh", x, parameters[name].astype(x.dtype))
        for name in ("query", "key", "value")
    )
    out = dot_product_attention(normalised(q), normalised(k), v, **kind.options)
    return jnp.einsum("btnh,nhw->btw", out, parameters["out"].astype(x.dtype))


def applied(parameters: list[Parameters], stack: tuple[Kind, ...], x: jax.Array) -> jax.Array:
    for layer, kind in zip(parameters, stack, strict=True):
        x = x + attention(normalised(x), layer, kind)
    return x


def trained(
    parameters: list[Parameters], stack: tuple[Kind, ...], x: jax.Array, goal: jax.Array, steps: int
) -> tuple[list[Parameters], list[float]]:
    """The parameters after some steps of gradient descent, and the loss before each."""

    @jax.jit
    def step(parameters):
        def loss(parameters):
            return jnp.square(applied(parameters, stack, x) - goal).astype(jnp.float32).mean()

        found, gradients = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), found

    losses = []
    for _ in range(steps):
        parameters, found = step(parameters)
        losses.append(float(found))
    return parameters, losses


def main() -> None:
    width, length = 256, 2048 if jax.default_backend() == "gpu" else 64
    keys = jax.random.split(jax.random.key(1))
    x, goal = (jax.random.normal(key, (1, length, width), jnp.bfloat16) for key in keys)
    for kind in (LOCAL, GLOBAL):
        q = jnp.zeros((1, length, kind.heads, kind.head_dim), jnp.bfloat16)
        k = jnp.zeros((1, length, kind.kv_heads, kind.head_dim), jnp.bfloat16)
        print(f"head dim {kind.head_dim}:", explain(q, k, k, **kind.options), sep="\n")
    _, losses = trained(drawn_parameters(0, STACK, width), STACK, x, goal, steps=5)
    print("losses:", *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
