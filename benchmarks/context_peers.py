"""TransformerEngine's context parallelism beside ours, on all GPUs of a host.

Needs transformer_engine with its JAX extension. The calls are those of context.py, forward and
backward. First, values: 4,096 tokens in bfloat16, the error of each result against float32, over
the size of the result (root mean squares). Then times, all in turn in one run. Arrays are in the
order that each way wants, and sharded, before the time begins. "striped" calls are packed (THD):
a GPU has every P-th token, or every P-th 128 tokens for a gather; TransformerEngine derives their
lengths from ids within the call, which is the only form that it takes there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformer_engine
import transformer_engine.jax.attention as te
from context import GRADIENTS, calls_of_a_round, in_turn, rms
from context_calls import CELLS, DIM, Cell, Compiled, able, arrays, on_all, on_one
from harness import Script
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from transformer_engine.jax.sharding import MeshResource, global_shard_guard

from attn_dispatch.sequence import restore


@dataclass(frozen=True)
class Way:
    """A way of TransformerEngine to spread a call. A stripe makes it a packed call."""

    strategy: Any
    stripe: int | None = None

    def reordered(self, x: Any, devices: int, *, back: bool = False) -> Any:
        do = te.inverse_reorder_causal_load_balancing if back else te.reorder_causal_load_balancing
        if devices == 1:
            return x
        if self.stripe is None:
            return do(x, te.ReorderStrategy.DualChunkSwap, devices, 1)
        return do(x, te.ReorderStrategy.Striped, devices, 1, self.stripe)


WAYS = {
    "ring": Way(te.CPStrategy.RING),
    "gather": Way(te.CPStrategy.ALL_GATHER),
    "ring striped": Way(te.CPStrategy.RING, stripe=1),
    "gather striped": Way(te.CPStrategy.ALL_GATHER, stripe=128),
}
KINDS = {
    "causal": (("zigzag", "heads"), ("ring", "gather")),
    "documents": (("documents", "heads"), ("ring striped", "gather striped")),
    "window": (("halo", "heads"), ("gather striped",)),
}
"""Strategies of ours and ways of theirs, by the first word of a cell's name."""
VALUES = {
    "causal 32k": {},
    "documents 32k": {"documents": (0.4, 0.3, 0.2, 0.1)},
    "window 4096 32k": {"options": {"is_causal": True, "local_window_size": (255, 0)}},
}
"""Cells whose values are compared, and what is smaller there. Few documents: a gather joins two
whose starts differ by 128 (P - 1) tokens."""


def program(cell: Cell, way: Way, *, is_packed: bool) -> Callable[..., Any]:
    masks, layouts = te.AttnMaskType, te.QKVLayout
    window = cell.options.get("local_window_size")

    def call(q: Any, k: Any, v: Any, described: Any) -> Any:
        return te.fused_attn(
            (q, k, v), None, described, None,
            attn_bias_type=te.AttnBiasType.NO_BIAS,
            attn_mask_type=masks.PADDING_CAUSAL_MASK if is_packed else masks.CAUSAL_MASK,
            qkv_layout=layouts.THD_THD_THD if is_packed else layouts.BSHD_BSHD_BSHD,
            softmax_type=te.AttnSoftmaxType.VANILLA_SOFTMAX,
            scaling_factor=DIM**-0.5,
            dropout_probability=0.0,
            is_training=True,
            max_segments_per_seq=max(len(cell.documents), 1),
            window_size=window,
            context_parallel_strategy=way.strategy,
            context_parallel_causal_load_balanced=way.strategy != te.CPStrategy.DEFAULT,
            context_parallel_axis="context",
            stripe_size=way.stripe,
        )  # fmt: skip

    def both(q: Any, k: Any, v: Any, out_grad: Any, described: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: call(q, k, v, described), q, k, v)
        return out, *pull(out_grad)

    return both


def described(cell: Cell, way: Way, devices: int, *, is_packed: bool) -> Any:
    """TransformerEngine's description of a row: its ids and positions, or its length."""
    if not is_packed:
        length = jnp.full((1,), cell.tokens, jnp.int32)
        return te.SequenceDescriptor.from_seqlens((length, length))
    ids = cell.ids()
    ids = np.ones((1, cell.tokens), np.int32) if ids is None else ids
    positions = np.arange(cell.tokens) - np.searchsorted(ids[0], ids[0], side="left")
    both = [way.reordered(jnp.asarray(x), devices) for x in (ids, positions[None].astype(np.int32))]
    return te.SequenceDescriptor.from_segment_ids_and_pos(*((x, x) for x in both))


def theirs(cell: Cell, way: Way, given: list[Any], devices: int) -> Compiled:
    """The call on so many GPUs."""
    mesh = jax.make_mesh(
        (devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    rows = NamedSharding(mesh, P(None, "context"))
    is_packed = bool(cell.documents) or way.stripe is not None
    placed = [jax.device_put(way.reordered(x, devices), rows) for x in given]
    placed.append(
        jax.tree.map(
            lambda x: jax.device_put(x, rows if x.ndim == 2 else NamedSharding(mesh, P())),
            described(cell, way, devices, is_packed=is_packed),
        )
    )
    with jax.set_mesh(mesh):
        made = jax.jit(program(cell, way, is_packed=is_packed), out_shardings=rows)
        return Compiled(made.lower(*placed).compile(), placed)


def calls(cell: Cell, given: list[Any]) -> dict[str, Compiled]:
    """Both libraries' calls on one GPU and on all, by name."""
    ours, ways = KINDS[cell.name.split()[0]]
    devices = jax.device_count()
    alone = Way(te.CPStrategy.DEFAULT)
    found = {"ours, one GPU": on_one(cell, "both", given)}
    found["TE, one GPU"] = theirs(cell, alone, given, 1)
    for x in ours:
        if able(cell, x, devices):
            found[f"ours, {x}"] = on_all(cell, "both", x, given)
    return found | {f"TE, {x}": theirs(cell, WAYS[x], given, devices) for x in ways}


def errors(cell: Cell) -> dict[str, dict[str, float]]:
    """The error of each result by call: root mean square, over that of the float32 result."""
    given, devices = arrays(cell), jax.device_count()
    exact = replace(cell, options=cell.options | {"implementation": "xla"})
    with jax.default_matmul_precision("highest"):
        expected = jax.device_get(on_one(exact, "both", [x.astype(jnp.float32) for x in given])())
    found = dict[str, dict[str, float]]()
    for name, call in calls(cell, given).items():
        library, way = name.split(", ")
        results = jax.device_get(call())
        if way != "one GPU" and library == "TE":
            results = [WAYS[way].reordered(x, devices, back=True) for x in results]
        elif way != "one GPU":
            results = [restore(x, devices, order=cell.order(way, devices)) for x in results]
        found[name] = {
            x: rms(y - want) / rms(want)
            for x, want, y in zip(GRADIENTS, expected, results, strict=True)
        }
    return found


def times(cell: Cell, rounds: int) -> dict[str, Any]:
    made = calls(cell, arrays(cell))
    ms = in_turn({**made}, {x: calls_of_a_round(y) for x, y in made.items()}, rounds)
    least = min(y for x, y in ms.items() if x.endswith("one GPU"))
    return {
        "ms": ms,
        "efficiency": {
            x: least / jax.device_count() / y for x, y in ms.items() if not x.endswith("one GPU")
        },
        "temporary_mb": {x: y.temporary_mb for x, y in made.items()},
    }  # fmt: skip


def main() -> None:
    script = Script("context_peers", __doc__, rounds=3)
    script.parser.add_argument("--time-limit", type=float, default=200)
    args, start = script.start(transformer_engine=transformer_engine.__version__), time.monotonic()
    script.report["devices"] = jax.device_count()
    by_name = {x.name: x for x in CELLS if x.name.split()[0] in KINDS}
    names = [*script.chosen(by_name, "*131k")]
    for name, smaller in VALUES.items():
        script.keep("values", name, errors(replace(by_name[name], tokens=4096, **smaller)))
    for name in names:
        if time.monotonic() - start < args.time_limit:
            script.keep("times", name, times(by_name[name], args.rounds))


if __name__ == "__main__":
    with global_shard_guard(MeshResource(cp_resource="context")):
        main()
