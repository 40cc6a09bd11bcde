"""Calls in a shard_map over some mesh axes, on eight CPU devices and for AITER; print JSON.

This is a separate process, because the number of devices is fixed when a process starts.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch
from attn_dispatch import dot_product_attention
from attn_dispatch.core import primitive
from tests.support.partitioned import partition
from tests.support.program_lists import specs_listed

ROWS = P(None, "cp")
BOTH, HEADS, BATCH = P("x", "cp", "y"), P(None, "cp", ("y", "x")), P("y", "cp")
B, T, N, H = 4, 32, 8, 8

MESH = jax.make_mesh((2, 2, 2), ("x", "cp", "y"), axis_types=(AxisType.Auto,) * 3)


def causal(*operands: Any) -> jax.Array:
    return dot_product_attention(*operands, is_causal=True)


def dropped(*operands: Any) -> jax.Array:
    return dot_product_attention(*operands, dropout_rate=0.4, dropout_key=jax.random.key(3))


def masked(*operands: Any) -> jax.Array:
    return dot_product_attention(*operands, mask_mod=lambda b, n, t, s: (t + b + n) % 3 != s % 2)


def in_layers(q: Any, k: Any, v: Any) -> jax.Array:
    return jax.lax.scan(lambda q, _: (jax.checkpoint(causal)(q, k, v), None), q, length=2)[0]


CASES: dict[str, tuple[Callable[..., jax.Array], int, P, P, tuple[int, ...] | None]] = {
    "batch and heads": (causal, 4, BOTH, BOTH, None),
    "heads over both": (causal, 4, HEADS, HEADS, None),
    "2 kv heads on 4": (causal, 2, HEADS, P(None, "cp", "y"), None),
    "dropout, 2 kv heads": (dropped, 2, HEADS, P(None, "cp", "y"), None),
    "mask_mod": (masked, 4, BOTH, BOTH, None),
    "layers under remat": (in_layers, 8, BOTH, BOTH, None),
    "keys along their length": (causal, 4, BATCH, P("y", ("cp", "x")), None),
    "bias of batch 1": (dot_product_attention, 4, BATCH, BATCH, (1, N, T // 2, T // 2)),
    "bias of all heads": (dot_product_attention, 4, BOTH, BOTH, (1, 1, T // 2, T // 2)),
}
"""The call, kv heads, the shardings of query and of keys, and the shape of a bias if there is one.
"""


@contextmanager
def recorded_calls() -> Generator[list[str]]:
    """The calls that devices compute, as they are lowered."""
    calls: list[str] = []
    compute = primitive._compute

    def recorded(*operands: Any, options: Any, **others: Any) -> Any:
        calls.append(str(primitive.AttentionSpec.of(operands, options)))
        return compute(*operands, options=options, **others)

    with mock.patch.object(primitive, "_compute", recorded):
        yield calls


def both(function: Any) -> Any:
    """The results of a function and its gradients."""

    def run(*operands: Any) -> Any:
        out, pull = jax.vjp(function, *operands)
        return out, pull(jnp.sin(out))

    return jax.jit(run)


def manual(function: Any, bias: tuple[int, ...] | None) -> Any:
    specs = (ROWS,) * 3 + (() if bias is None else (P(),))
    return jax.shard_map(function, mesh=MESH, in_specs=specs, out_specs=ROWS, axis_names={"cp"})


def one_by_one(function: Any) -> Any:
    """What the shard_map computes, without one: the call of each half of the rows."""

    def run(q: Any, k: Any, v: Any, *shared: Any) -> jax.Array:
        halves = zip(*(jnp.split(x, 2, axis=1) for x in (q, k, v)), strict=True)
        return jnp.concatenate([function(*half, *shared) for half in halves], axis=1)

    return run


def case(name: str) -> dict[str, Any]:
    function, kv_heads, of_query, of_keys, bias = CASES[name]
    rng = np.random.default_rng(0)
    shapes = [(B, T, n, H) for n in (N, kv_heads, kv_heads)] + ([] if bias is None else [bias])
    operands = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    expected = both(one_by_one(function))(*operands)
    specs = (of_query, of_keys, of_keys, P())
    given = [
        jax.device_put(x, NamedSharding(MESH, to)) for x, to in zip(operands, specs, strict=False)
    ]
    attn_dispatch.warning.forget()  # pyright: ignore[reportAttributeAccessIssue]
    # As on a GPU, where a kernel runs the call.
    with (
        mock.patch.object(primitive, "_has_kernel", lambda context, spec: True),
        warnings.catch_warnings(record=True) as caught,
        recorded_calls() as calls,
    ):
        warnings.simplefilter("always")
        compiled = both(manual(function, bias)).lower(*given).compile()
    got = compiled(*given)
    leaves = [jax.tree.leaves(jax.device_get(x)) for x in (got, expected)]
    return {
        "error": max(float(np.abs(x - y).max()) for x, y in zip(*leaves, strict=True)),
        "calls": sorted({x.split(", value")[0] for x in calls}),
        "warned": [str(x.message) for x in caught],
    }


def on_kernels() -> dict[str, Any]:
    """The calls of AITER's kernels after XLA has partitioned a program, and those in its list."""
    specs = (HEADS, P(None, "cp", "y"), P(None, "cp", "y"))
    structs = [
        jax.ShapeDtypeStruct((B, 256, n, 64), jnp.bfloat16, sharding=NamedSharding(MESH, spec))
        for n, spec in zip((N, 2, 2), specs, strict=True)
    ]

    def step(*operands: Any) -> Any:
        def loss(*operands: Any) -> jax.Array:
            return manual(causal, None)(*operands).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(*operands)

    with attn_dispatch.target("gfx942"), recorded_calls() as calls:
        lowered = jax.jit(step).trace(*structs).lower(lowering_platforms=("rocm",))
        partition(lowered)
        by_devices = sorted(calls)
        listed, found = specs_listed(step, *structs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.export.export(
                jax.jit(manual(causal, None)),
                platforms=["rocm"],
                disabled_checks=[
                    jax.export.DisabledSafetyCheck.custom_call("attn_dispatch_aiter_forward")
                ],
            )(*structs)
    return {
        "warned of the export": [str(x.message) for x in caught],
        "calls": by_devices,
        "listed": listed,
        "shares": [str(x.share) for x in found.calls],
    }


def main() -> None:
    print(json.dumps({name: case(name) for name in CASES} | {"kernels": on_kernels()}))


if __name__ == "__main__":
    main()
