"""Programs whose masks' arrays are bound beside their calls, on eight devices: a child process.

It prints JSON: for each layout and mask, the largest difference from XLA's formulas on one device,
relative to the largest number, the batch rows of the arrays that each kernel got, the calls that
made arrays of their own, and the collectives of the program.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import dot_product_attention
from attn_dispatch.semantics.mask_arrays import MaskArrays
from tests.support import interval_kernels_in_jax as in_jax
from tests.support.fa4_on_cpu import for_h200, install

BATCH, TOKENS, HEADS, KV_HEADS, DIM = 8, 14, 4, 2, 64
RNG = np.random.RandomState(0)
Q = jnp.asarray(RNG.randn(BATCH, TOKENS, HEADS, DIM), jnp.float32)
K, V = (jnp.asarray(RNG.randn(BATCH, TOKENS, KV_HEADS, DIM), jnp.float32) for _ in range(2))
IDS = np.sort(RNG.randint(0, 4, (BATCH, TOKENS)), axis=1).astype(np.int32)
CU_SEQLENS = np.sort(RNG.randint(0, TOKENS, (BATCH, 4)), axis=1).astype(np.int32)
CU_SEQLENS[:, 0] = 0

_COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)

LAYOUTS: dict[str, tuple[P, P]] = {
    "batch": (P("x"), P("x")),
    "batch and heads": (P("x", None, "y"), P("x")),
    "batch, ids whole": (P("x"), P()),
    "batch by both": (P(("x", "y")), P(("x", "y"))),
    "rows": (P(None, "y"), P()),
    "shard_map over x": (P("x", None, "y"), P("x")),
}
"""How query, key and value, and how ids are sharded along the axes x (4) and y (2)."""


def options_of(mask: str, ids: jax.Array) -> dict[str, Any]:
    if mask == "causal":
        return {"is_causal": True}
    if mask == "lengths":
        lengths = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), ids[:, 5] + 7)
        return {"is_causal": True, **lengths}
    same = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    return {"is_causal": True, "max_segments": 3, **same}


def gradients(mask: str, name: str, mesh: Mesh | None = None) -> Any:
    """The function of q, k, v and ids that trains two layers."""

    def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return dot_product_attention(q, k, v, implementation=name, **options_of(mask, ids))

    def call(*x: Any) -> Any:
        if mesh is None:
            return attend(*x)
        return jax.shard_map(
            attend, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
        )(*x)

    def loss(q: Any, k: Any, v: Any, ids: Any) -> Any:
        def step(q: Any, _: Any) -> Any:
            return q + jax.checkpoint(call)(q, k, v, ids), None

        return (jax.lax.scan(step, q, length=2)[0] ** 2).sum()

    return jax.value_and_grad(loss, (0, 1, 2))


@contextmanager
def noted() -> Iterator[SimpleNamespace]:
    """Kernels that note what they get."""
    found = SimpleNamespace(made=[], rows=set())
    of = MaskArrays.of

    def made(spec: Any, operands: Any, tile: Any) -> MaskArrays:
        found.made.append("backward" if spec.is_backward else "forward")
        return of(spec, operands, tile)

    def noting(run: Any, position: int) -> Any:
        def noted_run(*arguments: Any) -> Any:
            found.rows.add(arguments[position].shape[0])
            return run(*arguments)

        return noted_run

    kernels: Any = SimpleNamespace(
        forward=noting(in_jax.forward, 4), backward=noting(in_jax.backward, 2)
    )
    with pytest.MonkeyPatch.context() as patch, for_h200():
        install(patch, kernels)
        patch.setattr(MaskArrays, "of", staticmethod(made))
        yield found


def cell(layout: str, mask: str) -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    of_call, of_ids = LAYOUTS[layout]
    specs = (of_call, of_call, of_call, of_ids)
    arrays = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((Q, K, V, IDS), specs, strict=True)
    ]
    expected = jax.jit(gradients(mask, "xla"))(Q, K, V, jnp.asarray(IDS))
    with noted() as found:
        function = gradients(mask, "fa4", mesh if "shard_map" in layout else None)
        compiled = jax.jit(function).lower(*arrays).compile()
        results = compiled(*arrays)
    errors = [
        float(np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(y).max())
        for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    ]
    return {
        "error": max(errors),
        "made": found.made,
        "rows": sorted(found.rows),
        "collectives": sorted(set(_COLLECTIVES.findall(compiled.as_text() or ""))),
    }


MASKS = ("causal", "documents", "lengths")


def main() -> None:
    print(json.dumps({f"{x}|{y}": cell(x, y) for x in LAYOUTS for y in MASKS}))


if __name__ == "__main__":
    main()
