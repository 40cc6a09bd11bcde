"""Prints the bytes that each strategy sends in each pass: of a compiled program, and modelled.

It needs eight devices, which a CPU has only if the process is started so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, dot_product_attention
from attn_dispatch.core.context.cost import Devices, Hardware, SpreadCall
from attn_dispatch.core.context.hardware import H100, NVLINK_4
from attn_dispatch.core.context.strategy_costs import cost
from attn_dispatch.settings import ContextParallel
from attn_dispatch_tools.reports.exchanged import sent
from tests.support.present import present

LENGTH, DIM = 1024, 64
CASES = (
    ("heads", 64, 8, None), ("ring", 12, 4, None), ("gather", 12, 4, None),
    ("halo", 12, 4, 127), ("heads+ring", 16, 4, None),
)  # fmt: skip
"""Strategies, query heads, kv heads and windows."""


def passes(strategy: str, attention: Callable[..., jax.Array]) -> tuple[Any, Any]:
    """Programs of the forward pass, and of the backward pass with what the forward pass kept."""
    tokens, groups = P(None, ("ring", "heads")), P(None, "ring", "heads")

    def call(*given: jax.Array) -> jax.Array:
        if strategy != "heads+ring":
            return attention(*given)
        given = tuple(jax.lax.with_sharding_constraint(x, groups) for x in given)
        return jax.lax.with_sharding_constraint(attention(*given), tokens)

    return jax.jit(lambda *given: jax.vjp(call, *given)), jax.jit(lambda pull, x: pull(x))


def rows() -> Iterator[tuple[str, float, float]]:
    """Strategy and pass, the bytes of a program, and the modelled ones."""
    devices = jax.device_count()
    for strategy, heads, kv_heads, window in CASES:
        shape, names = ((2, 4), ("ring", "heads")) if "+" in strategy else ((devices,), ("cp",))
        mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
        kept = NamedSharding(mesh, P(None, names))
        query, key = (jnp.zeros((1, LENGTH, x, DIM), device=kept) for x in (heads, kv_heads))
        options = {} if window is None else {"local_window_size": (window, 0)}
        forward, backward = passes(
            strategy, lambda *x, o=options: dot_product_attention(*x, is_causal=True, **o)
        )
        named = cast("ContextParallel", strategy.removeprefix("heads+"))
        with jax.set_mesh(mesh), context_parallel(named):
            first = forward.lower(query, key, key).compile()
            _, pull = first(query, key, key)
            second = backward.lower(pull, query).compile()
        call = SpreadCall(1, LENGTH, LENGTH, heads, kv_heads, DIM, DIM, width=4, window=window)
        found = cost(strategy, call, Hardware(Devices(devices), NVLINK_4, H100)).passes()
        for name, made, part in zip(("forward", "backward"), (first, second), found, strict=True):
            yield f"{strategy} {name}", sent(present(made.as_text()), devices), part.sent


if __name__ == "__main__":
    print(json.dumps([*rows()]))
