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
from collections.abc import Callable
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

import attn_dispatch
from attn_dispatch import AttentionShardingWarning, context_parallel, paged_attention
from tests.core.context.spread_programs import exchanged
from tests.support.present import present

DRAWS = 56
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
    def dims(self) -> int:
        """The head dim of values."""
        return H if self.is_combined else V

    @property
    def own_pages(self) -> int:
        """The pages of each device; one of keys and one of values count as one."""
        return self.arrays["key_pages"].shape[0] // self.sizes["pool"]

    @property
    def is_crowded(self) -> bool:
        """Whether a row names pages of one device more often than this has pages."""
        table, size = self.arrays["page_table"], self.arrays["key_pages"].shape[-3]
        begins = size * np.arange(table.shape[1])
        is_read = begins < self.arrays["key_value_seq_lengths"][:, None]
        count = [(is_read & (table // self.own_pages == i)).sum(1) for i in range(8)]
        return bool(np.max(count) > self.own_pages)

    @property
    def is_cheap(self) -> bool:
        """Whether the summed results are less than the pages that would be gathered."""
        query, pool = self.arrays["query"], self.arrays["key_pages"]
        devices, data = self.sizes["pool"], self.sizes["data"]
        kept = 4 * query[..., 0].size * (self.dims + 1) * devices
        rows_of_heads = pool[..., 0].size // (2 if self.is_combined else 1)
        return kept < data * rows_of_heads * (H + self.dims) * (devices - 1)


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
    if rng.random() < 0.4:  # a row names one page repeatedly
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
    invalid = _spoil(rng, arrays, int(size)) if rng.random() < 0.3 else []
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
    """The errors of out and lse, the invalid rows and the collectives of a drawn call."""
    arguments = {"value_pages": None} if call.is_combined else {}
    attend = partial(paged_attention, **arguments, **call.options)
    expected = jax.jit(attend)(**call.arrays)
    got, sent = on_mesh(attend, call.sizes, call.kind, lambda mesh: placed(call, mesh))
    nan = {int(x) for y in got for x in np.argwhere(np.isnan(np.asarray(y)))[:, 0]}
    return {
        "errors": [error(x, y) for x, y in zip(got, expected, strict=True)],
        "nan": sorted(nan),
        "invalid": call.invalid,
        "is_cut": call.arrays["page_table"].shape[1] > call.own_pages,
        "is_crowded": call.is_crowded,
        "kind": call.kind.name,
        "dims": call.dims,
        "exchanged": sent,
        "call": {x: y.shape for x, y in call.arrays.items()} | call.sizes | call.options,
    }


def on_mesh(
    attend: Callable[..., Any], sizes: dict[str, int], kind: AxisType, place: Callable[..., Any]
) -> tuple[Any, dict[str, list[int]]]:
    """The results on a mesh, and the numbers of elements that devices exchange."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
    with jax.set_mesh(mesh):
        given = place(mesh)
        compiled = jax.jit(attend).lower(**given).compile()
        return compiled(**given), exchanged(present(compiled.as_text()))


def cases() -> dict[str, tuple[Callable[..., Any], P, int]]:
    """Calls of other forms by name, how their pool is sharded over ("a", "b"), and the queries."""

    def of(**options: Any) -> Callable[..., Any]:
        return partial(paged_attention, **options)

    def by_head(key_pages: Any, value_pages: Any, **given: Any) -> Any:
        pools = [jax.numpy.swapaxes(x, 1, 2) for x in (key_pages, value_pages)]
        return paged_attention(key_pages=pools[0], value_pages=pools[1], kv_layout="HND", **given)

    def ragged(query: Any, **given: Any) -> Any:
        starts = np.array([0, 1, 3, 3, 4], np.int32)
        return paged_attention(query[:, 0], cu_seqlens_q=starts, **given)

    def mapped(query: Any, page_table: Any, key_value_seq_lengths: Any, **pools: Any) -> Any:
        def attend(*rows: Any) -> Any:
            names = ("query", "page_table", "key_value_seq_lengths")
            return paged_attention(**dict(zip(names, rows, strict=True)), **pools)

        def halves(x: Any) -> Any:
            return x.reshape(2, -1, *x.shape[1:])

        return jax.vmap(attend)(*map(halves, (query, page_table, key_value_seq_lengths)))

    both, first = P(("a", "b")), P("a")

    def mod(score: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return score + s

    return {
        "two axes": (of(), both, 1),
        "an idle axis": (of(), first, 1),
        "pages by head": (by_head, both, 1),
        "cu_seqlens": (ragged, both, 1),
        "vmap": (mapped, both, 3),
        "all keys, many queries": (of(is_causal=False), both, 18),
        "gathered, many queries": (of(), both, 18),
        "gathered, window": (of(local_window_size=(5, 0)), both, 1),
        "gathered, ALiBi": (of(alibi_slopes=np.ones(4, np.float32)), both, 1),
        "gathered, score_mod": (of(score_mod=mod), both, 1),
        "gathered, heads": (of(), both, 1),
        "gathered, few pages": (of(), both, 16),
    }


def of_case(name: str, attend: Callable[..., Any], pool: P, queries: int) -> dict[str, Any]:
    """The errors, collectives and warnings of a case on both kinds of mesh axes."""
    rng = np.random.default_rng(1)
    pages = 16 if name == "gathered, few pages" else 64
    shapes = {"query": (4, queries, 4, H), "key_pages": (pages, 6, 2, H)}
    given: dict[str, Any] = {
        x: rng.standard_normal(y).astype(np.float32) for x, y in shapes.items()
    }
    given["value_pages"] = given["key_pages"][::-1]
    given["page_table"] = rng.integers(0, pages, (4, 7)).astype(np.int32)
    given["key_value_seq_lengths"] = np.array([42, 31, 20, 25], np.int32)
    expected = jax.jit(attend)(**given)

    def place(mesh: Any) -> dict[str, Any]:
        to = {"key_pages": pool, "value_pages": pool}
        return {x: jax.device_put(y, NamedSharding(mesh, to.get(x, P()))) for x, y in given.items()}

    found: dict[str, Any] = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with context_parallel("heads" if name == "gathered, heads" else "auto"):
                got, sent = on_mesh(attend, {"a": 4, "b": 2}, kind, place)
        texts = [str(x.message) for x in caught if x.category is AttentionShardingWarning]
        found[kind.name] = {"error": error(got, expected), "exchanged": sent, "warnings": texts}
        attn_dispatch.warning.forget()  # pyright: ignore[reportAttributeAccessIssue]
    return found


def attempted(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What the function returns, or an error: one failure is one call's, not all calls'."""
    try:
        return function(*arguments)
    except Exception as problem:
        return {"failed": f"{type(problem).__name__}: {problem}"[:2000]}


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
    rng = np.random.default_rng(0)
    calls = (drawn(rng) for _ in range(10 * draws))
    cheap = itertools.islice((x for x in calls if x.is_cheap), draws)
    report = {
        "drawn": [attempted(measured, x) for x in cheap],
        "cases": {x: attempted(of_case, x, *case) for x, case in cases().items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else DRAWS)
