"""Paged calls whose pool is spread over eight CPU devices, beside one device; prints JSON.

This is a separate process, because the number of devices is fixed when a process starts.

usage: python -m tests.core.context.spread_pages [DRAWS]
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

if __name__ == "__main__":  # tests import constants from here, in a process with one device
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
        "--xla_backend_optimization_level=0"
    )

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import paged_attention
from tests.core.context.spread_programs import exchanged
from tests.support.present import present

DRAWS = 60
H, V = 8, 16


@dataclass(frozen=True)
class Drawn:
    """A drawn call."""

    sizes: dict[str, int]
    """The mesh axes: "pool" splits pages, "data" the batch and "tensor" the heads."""
    kind: AxisType
    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    is_combined: bool = False
    """Whether keys and values are in one pool."""
    invalid: list[int] = field(default_factory=list[int])
    """The rows with a length or page that is not valid."""

    @property
    def is_cheap(self) -> bool:
        """Whether the summed results are less than the pages that would be gathered."""
        query, pool = self.arrays["query"], self.arrays["key_pages"]
        devices, data = self.sizes["pool"], self.sizes["data"]
        dims = 2 * H if self.is_combined else H + V
        kept = 4 * query[..., 0].size * (dims - H + 1) * devices
        rows_of_heads = pool[..., 0].size // (2 if self.is_combined else 1)
        return kept < data * rows_of_heads * dims * (devices - 1)


def drawn(rng: np.random.Generator) -> Drawn:
    """A call with GQA, ragged lengths, and maybe sinks, a soft cap and pages that are missing."""
    pool, data, tensor = rng.choice([(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 2, 2), (2, 4, 1)])
    size, columns, queries = rng.integers(1, 20), rng.integers(1, 14), rng.choice([1, 1, 2, 5])
    batch, kv_heads = data * rng.integers(1, 4), tensor * rng.integers(1, 3)
    heads, number = kv_heads * rng.integers(1, 4), pool * rng.integers(3, 20)
    is_combined = bool(rng.random() < 0.3)
    keys = rng.standard_normal((number, size, kv_heads, H), np.float32)
    dims = H if is_combined else V
    values = rng.standard_normal((number, size, kv_heads, dims), np.float32)
    table = rng.permuted(np.tile(np.arange(number), (batch, 1)), axis=1)[:, :columns]
    table = np.pad(table, ((0, 0), (0, columns - table.shape[1])))
    lengths = rng.integers(0, columns * size + 1, batch)
    lengths[rng.random(batch) < 0.2] = columns * size
    table = np.where(np.arange(columns) * size < lengths[:, None], table, rng.choice([-1, 9999]))
    if rng.random() < 0.2:  # a row names one page repeatedly
        table[0] = table[0, 0]
    arrays = {
        "query": rng.standard_normal((batch, queries, heads, H), np.float32),
        "key_pages": np.stack([keys, values], 1) if is_combined else keys,
        "page_table": table.astype(np.int32),
        "key_value_seq_lengths": lengths.astype(np.int32),
    }
    if not is_combined:
        arrays["value_pages"] = values
    options: dict[str, Any] = {"return_lse": True, "is_causal": bool(rng.random() < 0.7)}
    if rng.random() < 0.5:
        arrays["query_seq_lengths"] = rng.integers(0, queries + 1, batch).astype(np.int32)
    if rng.random() < 0.5:
        arrays["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if rng.random() < 0.3:
        options["logits_soft_cap"] = 2.0
    kind = AxisType.Explicit if rng.random() < 0.5 else AxisType.Auto
    invalid = _spoil(rng, arrays, size) if rng.random() < 0.3 else []
    sizes = {"data": int(data), "tensor": int(tensor), "pool": int(pool)}
    return Drawn(sizes, kind, arrays, options, is_combined, invalid)


def _spoil(rng: np.random.Generator, arrays: dict[str, np.ndarray], size: int) -> list[int]:
    """Make a row invalid."""
    lengths, table = arrays["key_value_seq_lengths"], arrays["page_table"]
    row = int(rng.integers(len(lengths)))
    what = rng.integers(4)
    if what == 0:
        lengths[row] = -3
    elif what == 1:
        lengths[row] = table.shape[1] * size + 1
    elif what == 2 or "query_seq_lengths" not in arrays:
        lengths[row], table[row, 0] = max(lengths[row], 1), rng.choice([-1, 9999])
    else:
        arrays["query_seq_lengths"][row] = rng.choice([-1, arrays["query"].shape[1] + 1])
    return [row]


def placed(call: Drawn, mesh: Any) -> dict[str, Any]:
    heads = P("data", None, "tensor")
    rest = {"page_table": P("data"), "key_value_seq_lengths": P("data")}
    kv_heads = P("pool", None, None, "tensor") if call.is_combined else P("pool", None, "tensor")
    specs = {"query": heads, "key_pages": kv_heads, "value_pages": kv_heads, **rest}
    return {
        x: jax.device_put(y, NamedSharding(mesh, specs.get(x, P()))) for x, y in call.arrays.items()
    }


def measured(call: Drawn) -> dict[str, Any]:
    """The errors of out and lse, the strategy and the collectives of a drawn call."""
    arguments = {"value_pages": None} if call.is_combined else {}
    attend = partial(paged_attention, **arguments, **call.options)
    expected = jax.jit(attend)(**call.arrays)
    kinds = (call.kind,) * len(call.sizes)
    mesh = jax.make_mesh(tuple(call.sizes.values()), tuple(call.sizes), axis_types=kinds)
    with jax.set_mesh(mesh):
        given = placed(call, mesh)
        compiled = jax.jit(attend).lower(**given).compile()
        got = compiled(**given)
    text = compiled.as_text()
    errors = [error(x, y) for x, y in zip(got, expected, strict=True)]
    nan = {int(x) for y in got for x in np.argwhere(np.isnan(np.asarray(y)))[:, 0]}
    return {
        "errors": errors,
        "nan": sorted(nan),
        "invalid": call.invalid,
        "exchanged": exchanged(present(text)),
        "call": {x: list(y.shape) for x, y in call.arrays.items()}
        | {"mesh": call.sizes, "kind": call.kind.name, **call.options},
    }


def attempted(call: Drawn) -> dict[str, Any]:
    """What `measured` returns, or an error: one failure is one call's, not all calls'."""
    try:
        return measured(call)
    except Exception as problem:
        return {"failed": f"{type(problem).__name__}: {problem}"[:2000], "call": repr(call)}


def error(got: Any, expected: Any) -> float:
    """The largest error as a share of the largest number; infinite if NaN or -inf differ."""
    got, expected = np.asarray(got), np.asarray(expected)
    is_finite = np.isfinite(expected)
    if not np.array_equal(got[~is_finite], expected[~is_finite], equal_nan=True):
        return float("inf")
    if not np.isfinite(got[is_finite]).all():
        return float("inf")
    if not is_finite.any():
        return 0.0
    scale = max(np.abs(expected[is_finite]).max(), 1)
    return float(np.abs(got[is_finite] - expected[is_finite]).max() / scale)


def main(draws: int) -> None:
    warnings.simplefilter("error")
    rng = np.random.default_rng(0)
    calls = (drawn(rng) for _ in range(10 * draws))
    cheap = itertools.islice((x for x in calls if x.is_cheap), draws)
    print(json.dumps({"drawn": [attempted(x) for x in cheap]}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else DRAWS)
