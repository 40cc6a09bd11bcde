"""The calls that devices get when XLA partitions programs, and those in the lists; print JSON.

This is a separate process, because the number of devices is fixed when a process starts.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import dot_product_attention, explain, target
from attn_dispatch.core import primitive
from tests.support.program_lists import specs_listed

AUTO = (AxisType.Auto, AxisType.Auto)
SIZES, NAMES = (4, 2), ("x", "y")

LAYOUTS = {
    "data": P("x"),
    "FSDP": P(("x", "y")),
    "tensor": P(None, None, "y"),
    "data and tensor": P("x", None, "y"),
    "tensor over both axes": P(None, None, ("x", "y")),
    "sequence": P("y", "x"),
    "keys along their length": P("y"),
    "whole": P(),
}


def call(q: Any, k: Any) -> jax.Array:
    return jax.grad(lambda q: dot_product_attention(q, k, k).astype(jnp.float32).sum())(q)


def model(x: Any, weights: Any) -> jax.Array:
    """Two layers in a scan under remat, whose weights are split along heads."""

    def layer(x: Any, weights: Any) -> Any:
        q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, weights)
        out = dot_product_attention(q, k, v, is_causal=True)
        return x + out.reshape(x.shape), None

    return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(jnp.float32).sum()


def listed(function: Any, *args: Any) -> dict[str, list[str]]:
    """The calls of one device in the list of a program, and which part they are."""
    with target("cpu"):
        specs, found = specs_listed(function, *args)
    return {"listed": specs, "share": [str(x.share) for x in found.calls]}


def partitioned(function: Any, *args: Any) -> list[str]:
    """The calls of one device when XLA has partitioned the program."""
    specs: set[str] = set()
    compute = primitive._compute

    def recorded(*operands: Any, options: Any, **others: Any) -> Any:
        specs.add(str(primitive.AttentionSpec.of(operands, options)))
        return compute(*operands, options=options, **others)

    primitive._compute = recorded
    jax.jit(function).lower(*args).compile()
    primitive._compute = compute
    return sorted(specs)


def main() -> None:
    mesh = jax.make_mesh(SIZES, NAMES, axis_types=AUTO)
    report = {}

    def struct(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    for name, spec in LAYOUTS.items():
        kv_heads = 2 if name == "data and tensor" else 8
        of_keys = P("y", "x") if name == "keys along their length" else spec
        arrays = (struct(spec, 8, 16, 8, 4), struct(of_keys, 8, 16, kv_heads, 4))
        found = explain(arrays[0], arrays[1], arrays[1], target="cpu")
        report[name] = listed(call, *arrays) | {
            "partitioned": partitioned(call, *arrays),
            "explained": [str(found.call), str(found.share)],
        }
    arrays = struct(P("x"), 8, 16, 32), struct(P(None, None, None, "y"), 2, 3, 32, 8, 4)
    step = jax.grad(model)
    report["model"] = listed(step, *arrays) | {"partitioned": partitioned(step, *arrays)}

    # A call in a shard_map over one axis of two, and a derivative by a formula.
    def mixed(q: Any) -> Any:
        inner = jax.shard_map(
            lambda q: dot_product_attention(q, q, q), in_specs=P("x"), out_specs=P("x"),
            mesh=mesh, axis_names={"x"},
        )(q)  # fmt: skip
        return jax.jvp(lambda q: dot_product_attention(q, q, q, is_causal=True), (inner,), (q,))

    q = struct(P("x", None, "y"), 8, 16, 8, 4)
    report["mixed"] = listed(mixed, q) | {"partitioned": partitioned(mixed, q)}

    # The same list for a mesh that does not exist.
    abstract = AbstractMesh(SIZES, NAMES, axis_types=AUTO)
    elsewhere = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(abstract, x.sharding.spec))
        for x in arrays
    ]
    report["model"]["elsewhere"] = listed(step, *elsewhere)["listed"]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
