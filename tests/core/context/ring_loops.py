"""Rings over sixteen CPU devices: errors, and the lengths of programs; prints JSON.

This is a separate process, because the number of devices is fixed when a process starts.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, dot_product_attention
from tests.core.context.spread_cases import CAUSAL, LSE, PACKED, jit, manual
from tests.support.spread_calls import Case, measured

MANY = {"context": 16}
CASES = {
    "zigzag": Case(
        manual(MANY, "ring", "zigzag"), batch=2, heads=3, kv_heads=1, further=("sinks",),
        options=CAUSAL | LSE,
    ),
    "packed": Case(
        jit(MANY, "ring"), batch=1, heads=3, kv_heads=1, further=("query_segment_ids",),
        options=PACKED | {"return_max_logits": True},
    ),
    "documents": Case(
        manual(MANY, "ring", "documents"), batch=1, rows=8, heads=3, kv_heads=1,
        further=("query_segment_ids",), options=PACKED | LSE,
    ),
    "full": Case(manual(MANY, "ring", check_vma=False), rows=3, keys=6, heads=3, kv_heads=1),
    "two axes": Case(
        manual({"context_a": 4, "context_b": 4}, "ring", "zigzag"), batch=1, heads=3, kv_heads=1,
        options=CAUSAL,
    ),
}  # fmt: skip


def length(devices: int) -> int:
    """The number of lines of a program for so many devices, forward and backward."""
    mesh = jax.make_mesh((devices,), ("context",), devices=jax.devices()[:devices])
    rows = P(None, "context")
    sharding = NamedSharding(mesh, rows)
    call: Any = partial(
        dot_product_attention, is_causal=True, context_axis="context", sequence_order="zigzag"
    )
    spread = jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows)
    query, key = (
        jax.ShapeDtypeStruct((1, 4 * devices, n, 4), jnp.float32, sharding=sharding) for n in (3, 1)
    )
    both = jax.value_and_grad(lambda *x: spread(*x).sum(), (0, 1, 2))
    with context_parallel("ring"):
        return len(jax.jit(both).lower(query, key, key).as_text().splitlines())


def main() -> None:
    found = {name: measured(case) for name, case in CASES.items()}
    report = {x: {"errors": y.errors, "strategies": y.strategies} for x, y in found.items()}
    print(json.dumps({"cases": report, "lengths": {x: length(x) for x in (4, 8, 12, 16)}}))


if __name__ == "__main__":
    main()
