"""What devices exchange where a block of `context_parallel` is around a program, or inside it.

It prints JSON: for each place of the block, the numbers of collectives in a gradient by strategy.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, dot_product_attention

COLLECTIVES = ("all-to-all", "all-gather", "collective-permute")


def collectives(strategy: Any, is_inside: bool) -> dict[str, int]:
    mesh = jax.make_mesh((4,), ("s",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((1, 64, 8, 16)), NamedSharding(mesh, P(None, "s")))

    def loss(q: Any) -> jax.Array:
        with context_parallel(strategy) if is_inside else nullcontext():
            out = dot_product_attention(q, q, q, is_causal=True)
        return (out**2).sum()

    with nullcontext() if is_inside else context_parallel(strategy):
        text = jax.jit(jax.grad(loss)).lower(x).compile().as_text() or ""
    return {name: text.count(f"{name}(") for name in COLLECTIVES}


if __name__ == "__main__":
    places = {"around": False, "inside": True}
    strategies = ("heads", "gather", "ring")
    print(json.dumps({x: {s: collectives(s, y) for s in strategies} for x, y in places.items()}))
