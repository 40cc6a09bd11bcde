"""Calls whose sequence is spread over the GPUs of a host, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch
from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.core.context.cost import (
    H100,
    H200,
    NVLINK_4,
    Devices,
    Hardware,
    Pass,
    SpreadCall,
)
from attn_dispatch.core.context.strategy_costs import cost, split
from attn_dispatch.sequence import Order, balance, reorder
from attn_dispatch.settings import ContextParallel
from attn_dispatch_tools.reports.exchanged import sent

DIM = 128
TAIL = (0.35, 0.2, 0.12, 0.09, 0.07, 0.05, 0.04, 0.03, 0.02, 0.01, 0.01, 0.01)
"""The lengths of documents as shares of the sequence: a long tail."""
UNIT = 16
"""Lengths of documents are multiples of it: of twice the GPUs, up to eight."""
ORDERS = ("zigzag", "documents")
"""Strategies in a shard_map: rings whose arrays are in this order before."""
RINGS = (*ORDERS, "ring", "heads+ring")


@dataclass(frozen=True)
class Cell:
    """A call, and the strategies that are timed."""

    name: str
    tokens: int
    strategies: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    documents: tuple[float, ...] = ()
    heads: tuple[int, int] = (32, 8)
    """Query heads and kv heads."""

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

    def spread(self, strategy: str = "") -> SpreadCall:
        """The call as the cost model sees it: of documents that are equally long.

        They are as long as gives as many pairs of queries and keys.
        """
        longest = round(sum(x**2 for x in self.documents) * self.tokens) or None
        window = self.options.get("local_window_size", (None,))[0]
        return SpreadCall(
            1, self.tokens, self.tokens, *self.heads, DIM, DIM, window=window, longest=longest,
            is_causal=self.options.get("is_causal", True),
            order=cast("SequenceOrder", strategy if strategy in ORDERS else "contiguous"),
        )  # fmt: skip

    @property
    def call(self) -> Callable[..., Any]:
        options = {"is_causal": True} | self.options

        def call(q: Any, k: Any, v: Any, ids: Any, **spread: Any) -> Any:
            more = dict(spread)
            if ids is not None:
                more |= {"query_segment_ids": ids, "max_segments": len(self.documents)}
            return attn_dispatch.dot_product_attention(q, k, v, **options, **more)

        return call


WINDOW = {"local_window_size": (4095, 0)}
CELLS = tuple(
    cell
    for size, tokens in (("32k", 32768), ("131k", 131072), ("524k", 524288))
    for cell in (
        Cell(f"causal {size}", tokens, ("heads", "zigzag", "ring", "heads+ring", "gather")),
        Cell(f"causal 28/4 {size}", tokens, ("heads", "zigzag", "heads+ring"), heads=(28, 4)),
        Cell(f"window 4096 {size}", tokens, ("heads", "halo"), WINDOW),
        Cell(f"documents {size}", tokens, ("heads", "documents", "zigzag", "ring"), documents=TAIL),
        Cell(f"full {size}", tokens, ("heads", "ring", "gather"), {"is_causal": False}),
    )
    if size == "32k" or not cell.name.startswith("full")
)


def able(cell: Cell, strategy: str, devices: int) -> bool:
    """Whether so many devices can run the strategy."""
    if strategy == "heads":
        return cell.heads[0] % devices == 0
    return strategy != "heads+ring" or split(cell.spread(), Devices(devices)) is not None


def arrays(cell: Cell, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    """query, key, value and the output's gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (*cell.heads, *reversed(cell.heads))
    return [
        jax.random.normal(key, (1, cell.tokens, n, DIM), jnp.float32).astype(dtype)
        for key, n in zip(keys, heads, strict=True)
    ]


def program(cell: Cell, direction: str, strategy: str) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, ids: Any) -> Any:
        if strategy == "heads+ring":
            groups, tokens = P(None, "ring", "heads"), P(None, ("ring", "heads"))
            q, k, v = (jax.lax.with_sharding_constraint(x, groups) for x in (q, k, v))
            return jax.lax.with_sharding_constraint(cell.call(q, k, v, ids), tokens)
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


@dataclass(frozen=True)
class Compiled:
    """A compiled program with its arrays."""

    made: jax.stages.Compiled
    placed: list[Any]

    def __call__(self) -> Any:
        return self.made(*self.placed)

    @property
    def temporary_mb(self) -> float:
        memory = self.made.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes / 1e6

    def sent_mb(self, devices: int) -> float:
        """What a device sends in a call, counted in the program."""
        text = self.made.as_text()
        assert text is not None
        return sent(text, devices) / 1e6


def mesh_of(cell: Cell, strategy: str, devices: int) -> jax.sharding.Mesh:
    """All GPUs along one axis; for "heads+ring" along two."""
    sizes: tuple[int, ...] = (devices,)
    if strategy == "heads+ring":
        groups = split(cell.spread(), Devices(devices))
        assert groups is not None
        sizes = tuple(reversed(groups))
    names = ("ring", "heads") if len(sizes) == 2 else ("context",)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def on_one(cell: Cell, direction: str, given: list[Any]) -> Compiled:
    """The call on the first GPU."""
    given = [*given, cell.ids()]
    placed = [None if x is None else jax.device_put(x, jax.devices()[0]) for x in given]
    return Compiled(jax.jit(program(cell, direction, "heads")).lower(*placed).compile(), placed)


def on_all(cell: Cell, direction: str, strategy: str, given: list[Any]) -> Compiled:
    """The call on all GPUs, whose arrays are sharded along the sequence."""
    devices = jax.device_count()
    mesh, order = mesh_of(cell, strategy, devices), cell.order(strategy, devices)
    rows = NamedSharding(mesh, P(None, mesh.axis_names))
    placed = [
        None if x is None else jax.device_put(reorder(x, devices, order=order), rows)
        for x in (*given, cell.ids())
    ]
    named = cast("ContextParallel", "ring" if strategy in RINGS else strategy)
    with jax.set_mesh(mesh), attn_dispatch.context_parallel(named):
        return Compiled(
            jax.jit(program(cell, direction, strategy)).lower(*placed).compile(), placed
        )


def modelled(cell: Cell, strategy: str, direction: str, devices: int) -> list[Pass]:
    """The passes of the call by the cost model, on GPUs like the first one."""
    chip = H200 if "H200" in jax.devices()[0].device_kind else H100
    where = Hardware(Devices(devices), NVLINK_4, chip)
    name = "ring" if strategy in ORDERS else strategy
    found = cost(name, cell.spread(strategy), where)
    return list(found.passes(needs_backward=direction == "both"))
