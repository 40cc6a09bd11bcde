"""One sequence over the GPUs of a host: every strategy beside one GPU.

usage: python benchmarks/context.py [--out FOLDER] [--time-limit S] [--only GLOB] [--values GLOB]
                                     [--rounds N]

First, values: 4,096 tokens in bfloat16 on all GPUs and on one, both against float32. Then times of
32k and 131k tokens, 32 heads on 8, head dim 128: forward, and forward and backward. All strategies
and one GPU take turns in one run. Efficiency is the time of one GPU, divided by the number of GPUs
and by the time of all. Arrays are sharded along the sequence by the mesh axis "context"; "zigzag"
and "documents" are rings in a shard_map whose arrays are in that order before. A round of calls
takes a tenth of a second at least, behind which the dispatch of all but the first is hidden, as in
a training step.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from command import save
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch
from attn_dispatch.sequence import Order, balance, reorder, restore
from attn_dispatch.settings import ContextParallel
from attn_dispatch_tools.reports.environment import environment

HEADS, KV_HEADS, DIM = 32, 8, 128
GRADIENTS = ("out", "dq", "dk", "dv")
TAIL = (0.35, 0.2, 0.12, 0.09, 0.07, 0.05, 0.04, 0.03, 0.02, 0.01, 0.01, 0.01)
"""The lengths of documents as shares of the sequence: a long tail."""
UNIT = 16
"""Lengths of documents are multiples of it: of twice the GPUs, up to eight."""
ORDERS = ("zigzag", "documents")
"""Strategies in a shard_map: rings whose arrays are in this order before."""
ROUND = 0.1
"""The least seconds of a round."""


@dataclass(frozen=True)
class Cell:
    """A call, and the strategies that are timed."""

    name: str
    tokens: int
    strategies: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    documents: tuple[float, ...] = ()

    def ids(self) -> np.ndarray | None:
        if not self.documents:
            return None
        ends = np.round(np.cumsum(self.documents) * self.tokens / UNIT).astype(int) * UNIT
        return (
            (np.searchsorted(ends, np.arange(self.tokens), side="right") + 1)
            .clip(max=len(self.documents))[None]
            .astype(np.int32)
        )

    def order(self, strategy: str, devices: int) -> Order:
        """The order of the arrays on so many devices."""
        if strategy == "documents":
            return balance(self.ids(), devices)
        return "zigzag" if strategy == "zigzag" else "contiguous"

    @property
    def call(self) -> Callable[..., Any]:
        options = {"is_causal": True} | self.options

        def call(q: Any, k: Any, v: Any, ids: Any, **spread: Any) -> Any:
            more = dict(spread)
            if ids is not None:
                more |= {"query_segment_ids": ids, "max_segments": len(self.documents)}
            return attn_dispatch.dot_product_attention(q, k, v, **options, **more)

        return call


CELLS = tuple(
    cell
    for size, tokens in (("32k", 32768), ("131k", 131072))
    for cell in (
        Cell(f"causal {size}", tokens, ("heads", "zigzag", "ring", "gather")),
        Cell(f"window 4096 {size}", tokens, ("heads", "halo"), {"local_window_size": (4095, 0)}),
        Cell(f"documents {size}", tokens, ("heads", "documents", "zigzag", "ring"), documents=TAIL),
        Cell(f"full {size}", tokens, ("heads", "ring", "gather"), {"is_causal": False}),
    )
    if not (size == "131k" and cell.name.startswith("full"))
)


def arrays(tokens: int, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    """query, key, value and the output's gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [
        jax.random.normal(key, (1, tokens, n, DIM), jnp.float32).astype(dtype)
        for key, n in zip(keys, heads, strict=True)
    ]


def program(cell: Cell, direction: str, strategy: str) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, ids: Any) -> Any:
        if strategy not in ORDERS:
            return cell.call(q, k, v, ids)
        rows = P(None, "context")
        spread = partial(cell.call, context_axis="context", sequence_order=strategy)
        return jax.shard_map(spread, in_specs=rows, out_specs=rows)(q, k, v, ids)

    if direction == "forward":
        return lambda q, k, v, out_grad, ids: call(q, k, v, ids)

    def both(q: Any, k: Any, v: Any, out_grad: Any, ids: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: call(q, k, v, ids), q, k, v)
        return out, *pull(out_grad)

    return both


def on(mesh: jax.sharding.Mesh | None, cell: Cell, given: list[Any], strategy: str) -> list[Any]:
    """The arrays of a call, sharded along the sequence or on the first GPU."""
    given = [*given, cell.ids()]
    if mesh is None:
        return [None if x is None else jax.device_put(x, jax.devices()[0]) for x in given]
    devices = mesh.devices.size
    order = cell.order(strategy, devices)
    given = [None if x is None else reorder(x, devices, order=order) for x in given]
    spread = NamedSharding(mesh, P(None, "context"))
    return [None if x is None else jax.device_put(x, spread) for x in given]


def compiled(
    mesh: jax.sharding.Mesh | None, cell: Cell, direction: str, strategy: str, given: list[Any]
) -> Callable[[], Any]:
    placed = on(mesh, cell, given, strategy)
    over = contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
    named = cast("ContextParallel", "ring" if strategy in ORDERS else strategy)
    with over, attn_dispatch.context_parallel(named):
        made = jax.jit(program(cell, direction, strategy)).lower(*placed).compile()
    memory = made.memory_analysis()
    call = lambda: made(*placed)  # noqa: E731
    call.temporary = memory.temp_size_in_bytes  # pyright: ignore
    return call


def errors(
    mesh: jax.sharding.Mesh, wanted: str = "*", tokens: int = 4096
) -> Iterator[dict[str, Any]]:
    """The error of each result on all GPUs, divided by that on one, both beside float32."""
    for like in CELLS:
        if not like.name.endswith("32k") or not fnmatch(like.name, wanted):
            continue
        options = {x: (255, 0) if x == "local_window_size" else y for x, y in like.options.items()}
        cell = Cell(like.name, tokens, like.strategies, options, like.documents)
        given = arrays(tokens)
        exact = Cell(cell.name, tokens, (), options | {"implementation": "xla"}, cell.documents)
        with jax.default_matmul_precision("highest"):
            call = compiled(None, exact, "both", "heads", [x.astype(jnp.float32) for x in given])
        expected = jax.device_get(call())
        one = jax.device_get(compiled(None, cell, "both", "heads", given)())
        for strategy in cell.strategies:
            many = jax.device_get(compiled(mesh, cell, "both", strategy, given)())
            devices = mesh.devices.size
            order = cell.order(strategy, devices)
            many = [restore(x, devices, order=order) for x in many]
            row: dict[str, Any] = {"cell": cell.name, "strategy": strategy}
            for name, want, a, b in zip(GRADIENTS, expected, one, many, strict=True):
                error = [
                    float(np.sqrt(np.mean((np.asarray(x, np.float32) - want) ** 2))) for x in (a, b)
                ]
                row[name] = error[1] / error[0]
            yield row


def seconds(call: Callable[[], Any], count: int) -> float:
    """The time of a call, of so many one after the other."""
    start = time.perf_counter()
    for _ in range(count - 1):
        call()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) / count


def times(mesh: jax.sharding.Mesh, cell: Cell, direction: str, rounds: int) -> dict[str, Any]:
    given = arrays(cell.tokens)
    calls = {"one GPU": compiled(None, cell, direction, "heads", given)}
    calls |= {x: compiled(mesh, cell, direction, x, given) for x in cell.strategies}
    found: dict[str, list[float]] = {x: [] for x in calls}
    counts: dict[str, int] = {}
    for name, call in calls.items():
        seconds(call, 1)
        counts[name] = math.ceil(ROUND / seconds(call, 3))
    names = list(calls)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds(calls[name], 1)
            found[name].append(seconds(calls[name], counts[name]))
    ms = {x: 1e3 * statistics.median(y) for x, y in found.items()}
    devices = mesh.devices.size
    return {
        "cell": cell.name, "direction": direction, "ms": ms,
        "efficiency": {x: ms["one GPU"] / devices / y for x, y in ms.items() if x != "one GPU"},
        "temporary_mb": {x: y.temporary / 1e6 for x, y in calls.items()},  # pyright: ignore
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", action="append", metavar="GLOB", help="cells named like this")
    parser.add_argument("--values", default="*", metavar="GLOB", help="cells whose values count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=200)
    args = parser.parse_args()
    start = time.perf_counter()
    mesh = jax.make_mesh(
        (len(jax.devices()),), ("context",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    report: dict[str, Any] = {"environment": environment(), "values": [], "times": []}
    for row in errors(mesh, args.values):
        report["values"].append(row)
        print(_at(start), _text(row), flush=True)
    for cell in CELLS:
        for direction in ("both", "forward"):
            if (
                not any(fnmatch(cell.name, x) for x in args.only or ["*"])
                or time.perf_counter() - start > args.time_limit
            ):
                continue
            report["times"].append(times(mesh, cell, direction, args.rounds))
            print(_at(start), _text(report["times"][-1]), flush=True)
            save("context", report, args.out)


def _at(start: float) -> str:
    return f"{time.perf_counter() - start:4.0f} s"


def _text(row: Any) -> str:
    if isinstance(row, dict):
        return ", ".join(f"{x} {_text(y)}" for x, y in row.items())
    return f"{row:.3f}" if isinstance(row, float) else str(row)


if __name__ == "__main__":
    sys.exit(main())
