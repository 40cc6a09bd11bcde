"""Segments longer than max_segment_len, and wrong lengths, over four CPU devices: the rows that are
NaN, and errors of the others and of gradients; prints JSON.

This is a separate process, because the number of devices is fixed when a process starts.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, dot_product_attention, sequence

DEVICES = 4
IDS = np.repeat([[1, 2, 3, 4]], [8, 32, 16, 8], axis=1).astype(np.int32)
CAUSAL = {"is_causal": True}
CASES: dict[str, tuple[Any, Any, int, dict[str, Any]]] = {
    "ring, unnoticed": ("ring", "zigzag", 16, CAUSAL),
    "ring": ("ring", "contiguous", 12, CAUSAL),
    "ring, full": ("ring", "zigzag", 12, {}),
    "ring, documents": ("ring", "documents", 5, CAUSAL),
    "gather": ("gather", "zigzag", 12, CAUSAL),
    "halo": ("halo", "contiguous", 12, CAUSAL | {"local_window_size": (9, 0)}),
}
"""A strategy, an order, max_segment_len, and further options."""


def differentiated(attend: Any, weight: np.ndarray, inputs: list[np.ndarray]) -> list[Any]:
    """out, lse, and gradients of a sum of those rows that are not NaN."""

    def loss(*x: jax.Array) -> Any:
        out, lse = attend(*x)
        kept = jnp.where(jnp.isnan(out), 0, out) * weight
        return kept.sum() + jnp.where(jnp.isnan(lse), 0, lse).sum(), (out, lse)

    gradients, results = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*inputs)
    return [np.array(x) for x in (*results, *gradients)]


def report(strategy: Any, order: Any, longest: int, options: dict[str, Any]) -> dict[str, Any]:
    rows = P(None, "context")
    given = options | {"max_segments": 4, "return_lse": True}

    def attend(ids: jax.Array, *x: jax.Array) -> Any:
        return dot_product_attention(
            *x, query_segment_ids=ids, max_segment_len=longest, context_axis="context",
            sequence_order=order, **given,
        )  # fmt: skip

    random = np.random.default_rng(0)
    *inputs, weight = (random.standard_normal((1, 64, 2, 8)).astype(np.float32) for _ in range(4))
    balance = sequence.balance(IDS, DEVICES)
    moved = None if order == "contiguous" else balance if order == "documents" else "zigzag"

    def there(x: Any) -> Any:
        return x if moved is None else np.asarray(_order(sequence.reorder, x, moved))

    mesh = jax.make_mesh((DEVICES,), ("context",))
    spread = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)
    with jax.set_mesh(mesh), context_parallel(strategy):
        held = [jax.device_put(there(x), rows) for x in (IDS, *inputs)]
        found = differentiated(lambda *x: spread(held[0], *x), there(weight), held[1:])
    found = [x if moved is None else np.array(_order(sequence.restore, x, moved)) for x in found]
    is_nan = np.asarray(np.isnan(found[0]).any((2, 3)))
    # One device, without a bound; what is NaN over four counts for nothing.
    weight[is_nan] = 0

    def whole(*x: jax.Array) -> Any:
        out, lse = dot_product_attention(*x, query_segment_ids=IDS, **given)
        return out, jnp.where(is_nan[..., None], jnp.nan, lse)

    expected = differentiated(whole, weight, inputs)
    names = ("out", "lse", "dq", "dk", "dv")
    for x in (found[0], expected[0]):
        x[is_nan] = 0
    errors = {
        x: float(np.nanmax(np.abs(a - b)))
        if np.array_equal(np.isnan(a), np.isnan(b)) and not np.isnan(a).all()
        else float("nan")
        for x, a, b in zip(names, found, expected, strict=True)
    }
    return {"errors": errors, "nan": np.unique(IDS[is_nan], return_counts=True)}


def wrong_lengths() -> dict[str, bool]:
    """Facts about gathered keys with lengths outside of the whole sequence."""
    rows, mesh = P(None, "context"), jax.make_mesh((DEVICES,), ("context",))
    x = np.random.default_rng(0).standard_normal((4, 16, 2, 8)).astype(np.float32)
    lengths = [np.array(x, np.int32) for x in ([-1, 17, 5, 6], [3, 3, 17, 16])]

    def attend(x: jax.Array, *lengths: jax.Array, axis: str | None = None) -> jax.Array:
        given = dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths, strict=True))
        return dot_product_attention(x, x, x, context_axis=axis, **given)

    one = jax.jit(attend)(x, *lengths)
    spread = jax.shard_map(
        partial(attend, axis="context"), mesh=mesh, in_specs=(rows, P(), P()), out_specs=rows
    )
    with jax.set_mesh(mesh), context_parallel("gather"):
        found = jax.jit(spread)(jax.device_put(x, rows), *lengths)
    return {
        "those rows alone are NaN": np.isnan(found).any((1, 2, 3)).tolist() == [True] * 3 + [False],
        "equal": np.allclose(found, one, atol=1e-6, equal_nan=True),
    }


def _order(move: Any, x: Any, order: Any) -> Any:
    return move(x, DEVICES) if order == "zigzag" else move(x, DEVICES, order=order)


def main() -> None:
    found = {name: report(*case) for name, case in CASES.items()}
    for x in found.values():
        x["nan"] = {str(i): int(n) for i, n in zip(*x["nan"], strict=True)}
    print(json.dumps({"segments": found, "lengths": wrong_lengths()}))


if __name__ == "__main__":
    main()
