"""What devices send, keep between the passes, and refuse, of calls spread over them; prints JSON.

This is a separate process, because the number of devices is fixed when a process starts.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

if __name__ == "__main__":  # tests import constants from here, in a process with one device
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    )

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, dot_product_attention, sequence
from tests.support.present import present
from tests.support.spread_calls import COLLECTIVES

T, N, K, H = 64, 3, 1, 8
ROWS = P(None, "context")
OPTIONS: dict[str, dict[str, Any]] = {
    "ring": {"is_causal": True},
    "ring, full": {},
    "gather": {"is_causal": True},
    "halo": {"is_causal": True, "local_window_size": (5, 0)},
}

Function = Callable[..., Any]


@cache
def mesh_of_all() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("context",))


def in_shard_map(order: str, **options: Any) -> Function:
    given = {"context_axis": "context", "sequence_order": order} | options
    return jax.shard_map(
        partial(dot_product_attention, **given),
        mesh=mesh_of_all(),
        in_specs=(ROWS,) * 3,
        out_specs=ROWS,
    )


def arrays(length: int = T, heads: int = N) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = ((1, length, n, H) for n in (heads, K, K))
    return tuple(on_mesh(rng.standard_normal(x).astype(np.float32)) for x in shapes)


def on_mesh(x: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh_of_all(), ROWS))


def exchanged(text: str) -> dict[str, list[int]]:
    """The numbers of elements of the results of a program's collectives, by collective."""
    text = re.sub(r"/\*.*?\*/", "", text)
    found = dict[str, list[int]]()
    for name in COLLECTIVES:
        for result in re.findall(rf"= (.*?) {name}(?:-start)?\(", text):
            shapes = re.findall(r"\w+\[([\d,]*)\]", result)
            sizes = (np.prod([int(x) for x in shape.split(",") if x]) for shape in shapes)
            found.setdefault(name, []).append(int(sum(sizes)))
    return found


def gradients(function: Function) -> Function:
    return jax.grad(lambda *x: jnp.sum(function(*x) ** 2), argnums=(0, 1, 2))


def pullback(function: Function) -> Function:
    return lambda *x: jax.vjp(function, *x)[1]


def kept(pull: Any) -> int:
    """The bytes that a device keeps for the backward pass; an array that is kept twice is one."""
    parts = {id(x): x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(pull)}
    return sum(parts.values())


def programs() -> Iterator[tuple[str, str, Function]]:
    for name, options in OPTIONS.items():
        strategy = name.split(",")[0]
        yield f"{name}|jit", strategy, partial(dot_product_attention, **options)
        orders = ("contiguous",) if strategy == "halo" else ("contiguous", "zigzag")
        for order in orders:
            yield f"{name}|{order}", strategy, in_shard_map(order, **options)


def measured(strategy: str, function: Function) -> dict[str, Any]:
    given = arrays()
    with jax.set_mesh(mesh_of_all()), context_parallel(strategy):  # pyright: ignore[reportArgumentType]
        texts = {
            "forward": jax.jit(function).lower(*given).compile().as_text(),
            "both": jax.jit(gradients(function)).lower(*given).compile().as_text(),
        }
        pull = jax.jit(pullback(function))(*given)
    sent = {x: exchanged(present(y)) for x, y in texts.items()}
    return {"exchanged": sent, "kept": kept(pull)}


def refused(run: Callable[[], Any]) -> str:
    """The error of a call, or the classes of its warnings."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return " ".join(sorted({x.category.__name__ for x in caught}))


def in_explicit_group() -> str:
    """The refusal to gather keys where other axes than that of the sequence are Explicit."""
    mesh = jax.make_mesh((4, 2), ("context", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    call = partial(dot_product_attention, context_axis="context")
    spread = jax.shard_map(
        call, mesh=mesh, axis_names={"context"}, in_specs=(ROWS,) * 3, out_specs=ROWS
    )
    given = (np.zeros((1, T, 2, H), np.float32),) * 3
    with jax.set_mesh(mesh), context_parallel("gather"):
        placed = jax.device_put(given, NamedSharding(mesh, P(None, "context", "tensor")))
        return refused(lambda: jax.jit(spread).lower(*placed))


def refusals() -> dict[str, str]:
    """Wrong and unsupported calls, and what they raise."""
    key = jax.random.key(0)
    lengths: dict[str, Any] = {
        "key_value_seq_lengths": np.array([8], np.int32), "is_causal": True,
        "causal_alignment": "top_left",
    }  # fmt: skip
    of_device: dict[str, Any] = {"query_segment_ids": np.ones((1, T // 8), np.int32)}
    window: dict[str, Any] = {"local_window_size": (3, 0)}

    def spread(
        order: str = "contiguous", length: int = T, strategy: Any = "ring", **options: Any
    ) -> str:
        with context_parallel(strategy):
            return refused(
                lambda: jax.jit(in_shard_map(order, **options)).lower(*arrays(length)).compile()
            )

    def tangents(**options: Any) -> str:
        call, given = in_shard_map("contiguous", **options), arrays()
        return refused(lambda: jax.jvp(call, given, given))

    def under_jit(heads: int = N, strategy: Any = "ring", **options: Any) -> str:
        def run() -> None:
            call = partial(dot_product_attention, **options)
            given = arrays(heads=heads)
            got = jax.jit(call)(*given)
            expected = jax.jit(call)(*map(np.asarray, given))
            assert np.max(abs(got - expected)) < 1e-5, "wrong"

        with jax.set_mesh(mesh_of_all()), context_parallel(strategy):
            return refused(run)

    return {
        "outside": refused(lambda: dot_product_attention(*arrays(), context_axis="context")),
        "other axis": spread(context_axis="tensor"),
        "misspelt axis": spread(context_axis="contexts"),
        "twice": spread(context_axis=("context", "context")),
        "no axes": spread(context_axis=()),
        "order": spread("stripes"),
        "misspelt order": spread("zig-zag"),
        "order without axis": refused(
            lambda: dot_product_attention(*arrays(), sequence_order="zigzag")
        ),
        "odd rows": spread("zigzag", length=8 * 3),
        "documents without ids": spread("documents"),
        "documents, heads": spread("documents", strategy="heads", is_causal=True, **of_device),
        "documents, window": spread("documents", is_causal=True, **of_device, **window),
        "window without causality": spread(local_window_size=(3, 3)),
        "lengths": spread(**lengths),
        "dropout": spread(dropout_rate=0.5, dropout_key=key),
        "score_mod": spread(score_mod=lambda score, b, n, t, s: score + t),
        "mask_mod": spread(strategy="heads", mask_mod=lambda b, n, t, s: t > s),
        "forward mode": tangents(),
        "group of Explicit axes": in_explicit_group(),
        "jit, lengths": under_jit(**lengths),
        "jit, dropout": under_jit(dropout_rate=0.5, dropout_key=key),
        "jit, mask_mod": under_jit(mask_mod=lambda b, n, t, s: t > s),
        "jit, window without causality": under_jit(local_window_size=(3, 3)),
        "unknown strategy": refused(lambda: context_parallel("stripes")),  # pyright: ignore[reportArgumentType]
        "Ulysses": refused(lambda: context_parallel("ulysses")),  # pyright: ignore[reportArgumentType]
    }


def of_documents() -> dict[str, bool]:
    """Facts about NaN in calls in the order of documents."""
    ids = np.repeat([1, 2, 0], [32, 16, 16])[None].astype(np.int32)
    order = sequence.balance(ids[0], 8)
    more: Any = {"context_axis": "context", "sequence_order": "documents", "max_segments": 2}

    @jax.jit
    @partial(jax.shard_map, mesh=mesh_of_all(), in_specs=ROWS, out_specs=ROWS)
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, v, query_segment_ids=ids, is_causal=True, **more)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh_of_all(), in_specs=ROWS, out_specs=ROWS)
    def full(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, v, query_segment_ids=ids, **more)

    def all_of(padding: float) -> Any:
        given = (np.where(ids[..., None, None] == 0, padding, x) for x in arrays())
        given = [on_mesh(sequence.reorder(x, 8, order=order)) for x in (*given, ids)]
        out, pull = jax.vjp(lambda *x: attend(*x, given[-1]), *given[:-1])
        return out, pull(jnp.ones_like(out))

    real, nan = (jax.tree.leaves(all_of(x)) for x in (0, np.nan))
    in_order = attend(*arrays(), on_mesh(ids))
    parts = np.split(np.isnan(in_order), 8, axis=1)
    whole = dot_product_attention(*arrays(), query_segment_ids=ids, max_segments=2)
    return {
        "without causality any order is right": np.allclose(
            full(*arrays(), on_mesh(ids)), whole, atol=1e-5
        ),
        "padding is not seen": all(map(np.array_equal, real, nan)),
        "another order is found where a document begins": bool(parts[0].any() & parts[4].any()),
    }


def main() -> None:
    found = {name: measured(strategy, function) for name, strategy, function in programs()}
    print(json.dumps({"programs": found, "refusals": refusals(), "documents": of_documents()}))


if __name__ == "__main__":
    main()
