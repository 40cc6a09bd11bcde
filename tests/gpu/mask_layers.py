"""Times of layers in a scan on a GPU, with their masks' arrays bound once and made in each layer.

usage: python -m tests.gpu.mask_layers [OUTPUT.json]
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import dot_product_attention
from attn_dispatch.core import primitive
from attn_dispatch_tools.bench.device_time import busy_seconds
from tests.support.made_arrays import KEEPS

LAYERS, TOKENS, HEADS, KV_HEADS, DIM = 8, 8192, 32, 8, 128
REPEATS = 5


def prefix(b: Any, n: Any, t: Any, s: Any, length: Any) -> Any:
    return (s <= t) | (s < length[b])


def options_of(mask: str, ids: jax.Array) -> dict[str, Any]:
    if mask == "causal":
        return {"is_causal": True}
    if mask == "prefix":
        return {"mask_mod": prefix, "mask_mod_args": (1024 * ids[:, 1024],)}
    same = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    return {"is_causal": True, "max_segments": -(-TOKENS // 1024), **same}


def steps(mask: str, keep: str) -> dict[str, Any]:
    """The forward pass and the gradient of the layers."""

    def layer(q: Any, k: Any, v: Any, ids: Any) -> Any:
        options = options_of(mask, ids)
        return q + dot_product_attention(q, k, v, implementation="fa4", **options)

    def forward(q: Any, k: Any, v: Any, ids: Any) -> Any:
        def step(q: Any, _: Any) -> Any:
            return KEEPS[keep](layer)(q, k, v, ids), None

        return jax.lax.scan(step, q, length=LAYERS)[0]

    def loss(*x: Any) -> Any:
        return (forward(*x).astype(jnp.float32) ** 2).mean()

    return {"forward": forward, "both": jax.grad(loss, (0, 1, 2))}


def measured(function: Any, arrays: tuple[Any, ...], *, is_bound: bool) -> tuple[float | None, Any]:
    """Microseconds of a layer, and the results."""

    def none(options: Any, operands: Any) -> None:
        return None

    replaced = primitive.tiles_to_bind if is_bound else none
    with mock.patch.object(primitive, "tiles_to_bind", replaced):
        compiled = jax.jit(lambda *x: function(*x)).lower(*arrays).compile()
    results = jax.block_until_ready(compiled(*arrays))

    def run() -> None:
        for _ in range(REPEATS):
            jax.block_until_ready(compiled(*arrays))

    busy, _ = busy_seconds(run)
    return None if busy is None else round(1e6 * busy / REPEATS / LAYERS, 1), results


def difference(found: Any, expected: Any) -> float:
    """The largest one, relative to the largest number."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(
        float(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)).max() / jnp.abs(y).max())
        for x, y in pairs
    )


def main() -> None:
    rng = np.random.RandomState(0)
    q, k, v = (
        jnp.asarray(rng.randn(1, TOKENS, heads, DIM) / 2, jnp.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    ids = jnp.arange(TOKENS, dtype=jnp.int32)[None] // 1024 + 1
    report: dict[str, Any] = {"device": jax.local_devices()[0].device_kind, "layers": {}}
    for mask in ("documents", "prefix", "causal"):
        for keep in ("no remat", "remat"):
            for name, function in steps(mask, keep).items():
                bound, found = measured(function, (q, k, v, ids), is_bound=True)
                unbound, expected = measured(function, (q, k, v, ids), is_bound=False)
                row = {"bound_us": bound, "unbound_us": unbound}
                row["difference"] = difference(found, expected)
                report["layers"][f"{mask}, {keep}, {name}"] = row
                print(mask, keep, name, json.dumps(row), flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
