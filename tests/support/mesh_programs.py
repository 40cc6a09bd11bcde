"""Attention programs on meshes, compared with the same programs on one device.

Collectives and flops are counted in the program that XLA compiled, flops as a share of those of the
same program on one device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch
from tests.support.present import present

B, T, N, H = 8, 64, 8, 16
FRONT = 3
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

Attention = Callable[..., jax.Array]


@dataclass(frozen=True)
class Program:
    """One call, and its gradients with respect to all floating arrays."""

    kv_heads: int
    further_arrays: tuple[str, ...] = ()
    """The names of the arrays beside query, key and value."""
    options: dict[str, Any] = field(default_factory=dict)
    in_jax_nn: bool = True
    front: str = ""
    """The unsharded first dim of query, key and value: a "batch dim", of "vmap", or "" for none."""

    def __hash__(self) -> int:
        return id(self)


PROGRAMS = {
    "N 8, K 8": Program(8),
    "N 8, K 4": Program(4),
    "N 8, K 2": Program(2),
    "N 8, K 1": Program(1),
    "bias": Program(4, ("bias",)),
    "lengths": Program(4, ("query_seq_lengths", "key_value_seq_lengths")),
    "segment ids": Program(4, ("query_segment_ids",), in_jax_nn=False),
    "sinks, ALiBi, K 2": Program(2, ("sinks", "alibi_slopes"), in_jax_nn=False),
    "dropout, K 2": Program(2, options={"dropout_rate": 0.3, "dropout_key": 5}, in_jax_nn=False),
    "a whole batch dim in front": Program(4, front="batch dim"),
    "vmap over a whole dim": Program(4, front="vmap"),
    "vmap over a whole dim, bias": Program(4, ("bias",), front="vmap"),
}

LAYOUTS = {
    "data": ((8,), P("x")),
    "FSDP": ((2, 4), P(("x", "y"))),
    "tensor": ((8,), P(None, None, "x")),
    "data and tensor": ((2, 4), P("x", None, "y")),
    "tensor over both axes": ((2, 4), P(None, None, ("x", "y"))),
    "sequence": ((2, 4), P("x", "y")),
}

KINDS = {
    "Auto": (AxisType.Auto, AxisType.Auto),
    "Explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


@lru_cache
def arrays(program: Program, dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {
        "query": (B, T, N, H), "key": (B, T, program.kv_heads, H),
        "value": (B, T, program.kv_heads, H), "out_grad": (B, T, N, H), "bias": (1, N, T, T),
        "sinks": (N,), "alibi_slopes": (N,),
    }  # fmt: skip
    if program.front:
        made |= {x: (FRONT, *made[x]) for x in ("query", "key", "value", "out_grad")}
    floats = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in made.items()}
    for name in ("query", "key", "value", "out_grad", "bias"):
        floats[name] = floats[name].astype(jnp.dtype(dtype))
    floats["alibi_slopes"] = np.abs(floats["alibi_slopes"])
    whole = {
        "query_seq_lengths": rng.integers(1, T + 1, B).astype(np.int32),
        "key_value_seq_lengths": rng.integers(1, T + 1, B).astype(np.int32),
        "query_segment_ids": np.sort(rng.integers(1, 4, (B, T)), axis=1).astype(np.int32),
    }
    wanted = ("query", "key", "value", "out_grad", *program.further_arrays)
    return {name: x for name, x in (floats | whole).items() if name in wanted}


def step(program: Program, attention: Attention) -> Callable[..., Any]:
    """A function of the arrays by name that returns out and the gradients."""
    options: dict[str, Any] = dict(program.options)
    if "dropout_key" in options:
        options["dropout_key"] = jax.random.key(options["dropout_key"])

    def run(given: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        given = dict(given)
        out_grad = given.pop("out_grad")
        floats = {x: y for x, y in given.items() if jnp.issubdtype(y.dtype, jnp.floating)}
        rest: dict[str, Any] = {x: y for x, y in given.items() if x not in floats}
        call = partial(attention, **rest, **options, is_causal=True)
        # jax.nn takes one batch dim.
        is_mapped = program.front == "vmap" or attention is jax.nn.dot_product_attention
        if program.front and is_mapped:
            call = _mapped(call)
        out, pull = jax.vjp(lambda x: call(**x), floats)
        return out, pull(out_grad)[0]

    return run


def _mapped(call: Attention) -> Attention:
    """The call mapped over the first dim of query, key and value."""

    def mapped(query: Any, key: Any, value: Any, **shared: Any) -> jax.Array:
        return jax.vmap(lambda q, k, v: call(query=q, key=k, value=v, **shared))(query, key, value)

    return mapped


def specs(program: Program, mesh: jax.sharding.Mesh, spec: P) -> dict[str, P]:
    """The sharding of each array: that of query, with kv heads split as far as they divide."""
    batch, rows, heads, _ = (*spec, None, None, None, None)[:4]
    axes = heads if isinstance(heads, tuple) else (heads,) if heads else ()
    while program.kv_heads % int(np.prod([mesh.shape[x] for x in axes])):
        axes = axes[:-1]
    key = P(batch, rows, axes or None)
    if program.front:
        spec, key = P(None, *spec), P(None, *key)
    return {
        "query": spec, "out_grad": spec, "key": key, "value": key, "bias": P(None, heads),
        "sinks": P(heads), "alibi_slopes": P(heads), "query_seq_lengths": P(batch),
        "key_value_seq_lengths": P(batch), "query_segment_ids": P(batch, rows),
    }  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    error: float
    share: float
    """Flops as a share of those of the program on one device."""
    collectives: dict[str, int]


@lru_cache
def on_one_device(
    program: Program, attention: Attention, dtype: str = "float32"
) -> tuple[Any, float]:
    given = arrays(program, dtype)
    compiled = jax.jit(step(program, attention)).lower(given).compile()
    return jax.device_get(compiled(given)), present(compiled.cost_analysis())["flops"]


def on_mesh(
    program: Program,
    mesh: jax.sharding.Mesh,
    spec: P,
    attention: Attention = attn_dispatch.dot_product_attention,
    dtype: str = "float32",
) -> tuple[Any, Any]:
    """The results of the program on a mesh, and the compiled program."""
    by_name = specs(program, mesh, spec)
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, by_name[name]))
        for name, x in arrays(program, dtype).items()
    }
    with jax.set_mesh(mesh):
        compiled = jax.jit(step(program, attention)).lower(placed).compile()
        return jax.device_get(compiled(placed)), compiled


def measured(
    program: Program,
    mesh: jax.sharding.Mesh,
    spec: P,
    attention: Attention = attn_dispatch.dot_product_attention,
    wrapped: Callable[[Attention], Attention] = lambda attention: attention,
) -> Measurement:
    """Compare the program on a mesh with the same program on one device."""
    expected, flops = on_one_device(program, attention)
    got, compiled = on_mesh(program, mesh, spec, wrapped(attention))
    errors = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), got, expected)
    text = compiled.as_text()
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return Measurement(
        error=float(max(jax.tree.leaves(errors))),
        share=present(compiled.cost_analysis())["flops"] / flops,
        collectives={name: n for name, n in counts.items() if n},
    )


def make_mesh(shape: tuple[int, ...], kind: str, devices: Any = None) -> jax.sharding.Mesh:
    names = ("x", "y")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=KINDS[kind][: len(shape)], devices=devices)


def in_shard_map(
    mesh: jax.sharding.Mesh, spec: P, program: Program, axes: set[str]
) -> Callable[[Attention], Attention]:
    """A wrapper that puts attention into a shard_map over these axes of the mesh."""

    def only(spec: P) -> P:
        return P(*(x if x in axes else None for x in spec))

    def wrapped(attention: Attention) -> Attention:
        def run(query: Any, key: Any, value: Any, **options: Any) -> jax.Array:
            by_name = {x: only(y) for x, y in specs(program, mesh, spec).items()}
            return jax.shard_map(
                partial(attention, **options), mesh=mesh, axis_names=axes,
                in_specs=(by_name["query"], by_name["key"], by_name["value"]),
                out_specs=by_name["query"],
            )(query, key, value)  # fmt: skip

        return run

    return wrapped


def cells() -> Iterator[tuple[str, str, str]]:
    """The layout, program and kind of axes of every row of docs/bench/meshes.md."""
    for layout, (shape, _) in LAYOUTS.items():
        for name, program in PROGRAMS.items():
            if program.front and layout not in ("data", "data and tensor"):
                continue
            # Arrays by batch row and head matter only where rows or heads are split.
            is_plain = name in ("N 8, K 4", "N 8, K 2", "N 8, K 1")
            if "tensor" not in layout.split() and not (is_plain or program.front):
                continue
            if layout == "tensor over both axes" and name not in ("N 8, K 4", "N 8, K 2"):
                continue
            for kind in KINDS:
                # Mixed axes are treated as Auto ones, for which one program is enough.
                if kind == "mixed" and (len(shape) == 1 or program is not PROGRAMS["N 8, K 2"]):
                    continue
                yield layout, name, kind
