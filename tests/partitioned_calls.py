"""Calls on four virtual CPU devices, each against the same call on one; prints JSON.

A script of its own, because the number of devices is fixed when a process starts.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch

SHARDINGS = {
    "batch": P("x"),
    "heads": P(None, None, "y"),
    "batch_and_heads": P("x", None, "y"),
    "batch_over_both": P(("x", "y")),
    "heads_over_both": P(None, None, ("x", "y")),
    "sequence": P(None, "x"),
}


def arrays(kv_heads: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((4, 64, 8, 16), (4, 64, kv_heads, 16), (4, 64, kv_heads, 16), (4, 64, 8, 16))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def step(q, k, v, out_grad, **options):
    """out, lse and the three gradients, lse taking part in the derivative."""

    def call(q, k, v):
        return attn_dispatch.dot_product_attention(
            q, k, v, is_causal=True, return_lse=True, **options
        )

    (out, lse), pull = jax.vjp(call, q, k, v)
    return out, lse, *pull((out_grad, jnp.ones_like(lse)))


def error(got, expected) -> float:
    """Largest absolute difference; infinite where NaN or infinities are in different places."""

    def difference(x, y):
        return jnp.where(x == y, 0, jnp.nan_to_num(jnp.abs(x - y), nan=jnp.inf)).max()

    return max(float(difference(x, y)) for x, y in zip(got, expected, strict=True))


def place(x: jax.Array, mesh: jax.sharding.Mesh, spec: P) -> jax.Array:
    """x sharded so, as far as its heads can be."""
    if len(spec) == 3 and x.shape[2] % 4:
        spec = P(spec[0])
    return jax.device_put(x, NamedSharding(mesh, spec))


def under_jit(mesh: jax.sharding.Mesh, kv_heads: int, spec: P) -> dict[str, Any]:
    operands = arrays(kv_heads)
    sharded = [place(x, mesh, spec) for x in operands]
    compiled = jax.jit(step).lower(*sharded).compile()
    results = compiled(*sharded)
    return {
        "error": error(results, jax.jit(step)(*operands)),
        "gathers": "all-gather" in compiled.as_text(),
        "out": list(results[0].sharding.spec),
    }


def under_shard_map(mesh: jax.sharding.Mesh, **options: Any) -> float:
    """Batch sharded, keys and values shared by all devices; their gradients sum over devices."""
    q, _, _, out_grad = arrays(8)
    _, k, v, _ = (x[:1] for x in arrays(2))

    def attend(q, k, v):
        k, v = (jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
        return attn_dispatch.dot_product_attention(q, k, v, is_causal=True, **options)

    def loss(q, k, v, out_grad):
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
        return (mapped(q, k, v) * out_grad).sum()

    def plain_loss(q, k, v, out_grad):
        return (attend(q, k, v) * out_grad).sum()

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v, out_grad)
    return error(got, jax.jit(jax.grad(plain_loss, argnums=(0, 1, 2)))(q, k, v, out_grad))


def shared_bias_under_shard_map(mesh: jax.sharding.Mesh) -> float:
    """A bias of which every device has the same copy, next to sharded operands."""
    q, k, v, out_grad = arrays(2)
    bias = jax.random.normal(jax.random.key(9), (1, 8, 64, 64))

    def attend(q, k, v, bias):
        return attn_dispatch.dot_product_attention(q, k, v, bias)

    specs = (P("x"), P("x"), P("x"), P())
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("x"))
    gradients = [
        jax.jit(jax.grad(lambda b, f=f: (f(q, k, v, b) * out_grad).sum()))(bias)
        for f in (mapped, attend)
    ]
    return error(gradients[:1], gradients[1:])


def with_every_operand(mesh: jax.sharding.Mesh) -> float:
    """A call that XLA partitions by itself, its batch sharded."""
    operands = arrays(2)
    bias = jax.random.normal(jax.random.key(9), (1, 8, 64, 64))
    lengths = jnp.array([64, 10, 0, 33])
    sinks, slopes = jnp.linspace(-1, 1, 8), jnp.linspace(0.1, 0.5, 8)

    def call(bias, q, k, v, out_grad):
        return step(
            q, k, v, out_grad, bias=bias, key_value_seq_lengths=lengths, sinks=sinks,
            alibi_slopes=slopes, query_segment_ids=jnp.ones((4, 64), int),
        )  # fmt: skip

    sharded = [place(x, mesh, P("x")) for x in operands]
    return error(jax.jit(call)(bias, *sharded), jax.jit(call)(bias, *operands))


def main() -> None:
    auto = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    explicit = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    report: dict[str, Any] = {
        f"{name}-{kv_heads}": under_jit(auto, kv_heads, spec)
        for kv_heads in (8, 2, 1)
        for name, spec in SHARDINGS.items()
    }
    with jax.set_mesh(explicit):
        report["explicit"] = under_jit(explicit, 4, P("x"))
    report["every_operand"] = with_every_operand(auto)
    report["shard_map"] = under_shard_map(auto)
    report["shard_map_window"] = under_shard_map(auto, local_window_size=5)
    report["shard_map_bias"] = shared_bias_under_shard_map(auto)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
