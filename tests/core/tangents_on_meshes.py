"""Forward-mode derivatives on four CPU devices, by stand-ins for fa4's kernels; print JSON.

This is a separate process, because the number of devices is fixed when a process starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import dot_product_attention, fallback, target
from attn_dispatch.fa4 import compiled
from tests.support.h100_of_stand_ins import install

SHAPES = ((4, 20, 4, 64), (4, 20, 2, 64), (4, 20, 2, 64))
ARRAYS = tuple(
    jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(2 * SHAPES)
)
ROWS = P(("x", "y"))
HEADS = P("x", None, "y")


def jvp(implementation: str | tuple[str, ...], *arrays: jax.Array) -> Any:
    attention = partial(dot_product_attention, is_causal=True, implementation=implementation)
    return jax.jvp(attention, arrays[:3], arrays[3:])


def mapped(*arrays: jax.Array) -> Any:
    split = (x[:, None] for x in arrays)
    return jax.tree.map(lambda x: x[:, 0], jax.vmap(by_kernel)(*split))


by_kernel = partial(jvp, ("fa4", "xla"))


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))


def shards(program: Callable[..., Any], spec: P, **options: Any) -> Callable[..., Any]:
    return jax.shard_map(
        program, mesh=mesh(AxisType.Auto), in_specs=(spec,) * 6, out_specs=spec, check_vma=False,
        **options,
    )  # fmt: skip


def found(program: Callable[..., Any], arrays: Any) -> dict[str, Any]:
    exact = jax.jit(partial(jvp, "xla"))(*(x.astype(jnp.float32) for x in ARRAYS))
    jitted = jax.jit(program)
    text = jitted.lower(*arrays).as_text()
    got = jitted(*arrays)
    errors = [
        np.abs(np.asarray(x, np.float32) - np.asarray(y)).max() / np.abs(np.asarray(y)).max()
        for x, y in zip(got, exact, strict=True)
    ]
    return {"kernels": text.count(f"@{compiled.TANGENT_TARGET}"), "error": float(max(errors))}


def report() -> dict[str, Any]:
    def put(kind: AxisType, spec: P = ROWS) -> list[jax.Array]:
        return [jax.device_put(x, NamedSharding(mesh(kind), spec)) for x in ARRAYS]

    auto = put(AxisType.Auto)
    results: dict[str, Any] = {
        "one device": found(by_kernel, ARRAYS),
        "Auto": found(by_kernel, auto),
        "shard_map": found(shards(by_kernel, ROWS), auto),
        "shard_map over one axis of two": found(shards(by_kernel, P("x"), axis_names={"x"}), auto),
        "shard_map, mapped": found(shards(mapped, ROWS), auto),
        "shard_map over heads": found(shards(by_kernel, HEADS), auto),
        "Auto, rows and heads": found(by_kernel, put(AxisType.Auto, HEADS)),
        "Auto, mapped": found(mapped, auto),
    }
    with jax.set_mesh(mesh(AxisType.Explicit)):
        results["Explicit"] = found(by_kernel, put(AxisType.Explicit))
        results["Explicit, mapped"] = found(mapped, put(AxisType.Explicit))
    try:
        jax.jit(partial(jvp, "fa4")).lower(*auto)
    except NotImplementedError as error:
        results["named"] = str(error)
    return results


def main() -> None:
    install(pytest.MonkeyPatch())
    with target("sm90"), fallback("silent"):
        print(json.dumps(report()))


if __name__ == "__main__":
    main()
