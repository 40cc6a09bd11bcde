"""Compare calls with mods and sharded arrays on eight CPU devices with one device; print JSON.

This is a separate process, because the number of devices is fixed when a process starts.

usage: python -m tests.mods.mod_meshes
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import dot_product_attention
from tests.support.mesh_programs import make_mesh

T, N, H = 16, 8, 8
NamedArrays = dict[str, Any]


def drawn(leading: tuple[int, ...], kv_heads: int = 4) -> NamedArrays:
    """query, key, value, and the table [N, batch rows, T] and lengths that the mods read."""
    rng = np.random.default_rng(0)
    shapes = {
        "query": (*leading, T, N, H), "key": (*leading, T, kv_heads, H),
        "value": (*leading, T, kv_heads, H), "table": (N, int(np.prod(leading)), T),
    }  # fmt: skip
    found: NamedArrays = {x: rng.standard_normal(y).astype(np.float32) for x, y in shapes.items()}
    found["lengths"] = rng.integers(1, T, int(np.prod(leading))).astype(np.int32)
    return found


def shifted(score, b, n, t, s, table):
    """A score_mod whose result depends on every index."""
    return score * (1 + 0.1 * n) + table[n, b, t] * (s - 3)


def prefix(b, n, t, s, lengths):
    return (s <= t) | (s < lengths[b] + n)


def given(x: NamedArrays) -> jax.Array:
    return dot_product_attention(
        x["query"], x["key"], x["value"], score_mod=shifted, score_mod_args=(x["table"],),
        mask_mod=prefix, mask_mod_args=(x["lengths"],),
    )  # fmt: skip


def captured(x: NamedArrays) -> jax.Array:
    return dot_product_attention(
        x["query"], x["key"], x["value"],
        score_mod=lambda *score: shifted(*score, x["table"]),
        mask_mod=lambda *pair: prefix(*pair, x["lengths"]),
    )  # fmt: skip


def both(call: Callable[[NamedArrays], jax.Array], x: NamedArrays) -> Any:
    """The result, and the gradients of all floating arrays."""
    floats = {k: v for k, v in x.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    out, pull = jax.vjp(lambda y: call(x | y), floats)
    return out, pull(jnp.sin(out))[0]


def placed(x: NamedArrays, mesh: jax.sharding.Mesh, specs: dict[str, P]) -> NamedArrays:
    return {k: jax.device_put(v, NamedSharding(mesh, specs.get(k, P()))) for k, v in x.items()}


def error(got: Any, expected: Any) -> float:
    differences = jax.tree.map(
        lambda x, y: np.max(np.abs(x - y) / (1 + np.abs(y))), *jax.device_get((got, expected))
    )
    return float(max(jax.tree.leaves(differences)))


def qkv(spec: P, key: P | None = None) -> dict[str, P]:
    key = spec if key is None else key
    return {"query": spec, "key": key, "value": key}


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, P]]] = {
    "batch and heads": ((2, 4), (4,), 4, qkv(P("x", None, "y"))),
    "more devices than kv heads": ((8,), (2,), 2, qkv(P(None, None, "x"), P())),
    "batch, more devices than kv heads": ((2, 4), (2,), 2, qkv(P("x", None, "y"), P("x"))),
    "first of two dims": ((2, 4), (2, 3), 4, qkv(P("x", None, None, "y"))),
    "second of two dims": ((2, 4), (3, 2), 4, qkv(P(None, "x", None, "y"))),
    "sequence": ((2, 4), (2,), 4, qkv(P("x", "y"))),
    "table over heads": ((2, 4), (2,), 4, qkv(P("x", None, "y")) | {"table": P("y", "x")}),
    "batch, table over places": (
        (8,), (8,), 4, qkv(P("x")) | {"table": P(None, None, "x"), "lengths": P("x")},
    ),
}  # fmt: skip
"""Mesh, leading dims, kv heads and shardings; arrays that are not named are replicated."""


def under_jit() -> dict[str, float]:
    found = {}
    for name, (shape, leading, kv_heads, specs) in LAYOUTS.items():
        x = drawn(leading, kv_heads)
        run, run_captured = (jax.jit(partial(both, call)) for call in (given, captured))
        expected = run(x)
        for kind in ("Auto", "Explicit", "mixed"):
            if kind == "mixed" and name != "batch and heads":
                continue
            mesh = make_mesh(shape, kind)
            with jax.set_mesh(mesh):
                found[f"{name}|{kind}"] = error(run(placed(x, mesh, specs)), expected)
                if (name, kind) in CAPTURED:
                    got = run_captured(placed(x, mesh, specs))
                    found[f"{name}|{kind}|captured"] = error(got, expected)
    return found


CAPTURED = {
    ("table over heads", "Auto"),
    ("second of two dims", "Explicit"),
}  # fmt: skip
"""Layouts and kinds of axes to run with captured arrays as well."""


def captured_and_sharded() -> dict[str, Any]:
    """The error of each call's numbers, or the message if it raises."""
    mesh, x = make_mesh((2,), "Explicit"), drawn((2,))
    specs = qkv(P("x")) | {"table": P(None, "x"), "lengths": P()}

    def loop(score, b, n, t, s, table):
        return jax.lax.fori_loop(0, 2, lambda i, y: y + table[n, b, i], score)

    def rule(score, b, n, t, s, table):
        return jax.nn.softplus(score * table[n, b, t])

    def error_or_message(
        call: Callable[[NamedArrays], Any], expected: Callable[[NamedArrays], Any]
    ) -> Any:
        try:
            with jax.set_mesh(mesh):
                got = jax.jit(partial(both, call))(placed(x, mesh, specs))
        except ValueError as problem:
            return str(problem)
        return error(got, jax.jit(partial(both, expected))(x))

    found = {"Explicit": error_or_message(captured, captured)}
    for name, mod in {"plain": shifted, "a loop": loop, "a rule": rule}.items():
        for source in ("captured", "given"):
            call = partial(_with_table, mod, source == "captured")
            on_mesh = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=P("x"))
            expected = partial(_with_table, mod, False)
            label = f"shard_map, {name}" + (", given" if source == "given" else "")
            found[label] = error_or_message(on_mesh, expected)
    return found


def _with_table(mod: Callable[..., Any], is_captured: bool, x: NamedArrays) -> jax.Array:
    read = () if is_captured else (x["table"],)
    return dot_product_attention(
        x["query"], x["key"], x["value"], score_mod_args=read,
        score_mod=(lambda *score: mod(*score, x["table"])) if is_captured else mod,
    )  # fmt: skip


def under_shard_map() -> dict[str, float]:
    """Under shard_map each device computes a separate call, in which b and n count from 0."""
    x, found = drawn((4,)), {}
    for name, spec in {"all axes": P("x", None, "y"), "one axis": P("x")}.items():
        for kind in ("Auto", "Explicit"):
            mesh = make_mesh((2, 4), kind)
            specs = {"table": P(), "lengths": P()} | qkv(spec)
            manual = {"x"} if name == "one axis" else set(mesh.axis_names)
            expected = jax.jit(partial(both, partial(by_parts, spec, mesh)))(x)
            for source, call in (("given", given), ("captured", captured)):
                on_mesh = jax.shard_map(
                    call, mesh=mesh, in_specs=(specs,), out_specs=spec, axis_names=manual
                )
                got = jax.jit(partial(both, on_mesh))(placed(x, mesh, specs))
                found[f"{name}|{kind}|{source}"] = error(got, expected)
    return found


def by_parts(spec: P, mesh: jax.sharding.Mesh, x: NamedArrays) -> jax.Array:
    """The devices' calls, one after the other, on one device."""
    axes = [(i, mesh.shape[axis]) for i, axis in enumerate(spec) if axis]

    def parts(x: NamedArrays, axes: list[tuple[int, int]]) -> jax.Array:
        if not axes:
            return given(x)
        (axis, count), *others = axes
        pieces_of = {name: jnp.split(x[name], count, axis) for name in ("query", "key", "value")}
        calls = (x | {name: y[i] for name, y in pieces_of.items()} for i in range(count))
        return jnp.concatenate([parts(y, others) for y in calls], axis)

    return parts(x, axes)


def mapped() -> dict[str, float]:
    """vmap of a call with sharded arrays; the mods' arrays are mapped or shared."""
    x, found = drawn((2, 4)), {}
    x["table"] = x["table"][:, :4]
    mapped_x = x | {"table": np.stack([x["table"], 2 * x["table"]])}
    shared_axes = dict.fromkeys(x, 0) | {"table": None, "lengths": None}
    table_axes = shared_axes | {"table": 0}
    tried = {
        "shared table": (x, lambda **o: partial(both, jax.vmap(given, (shared_axes,), **o))),
        "mapped tables": (
            mapped_x, lambda **o: partial(both, jax.vmap(given, (table_axes,), **o))
        ),
        "gradients of each": (x, lambda **o: jax.vmap(partial(both, given), (shared_axes,), **o)),
    }  # fmt: skip
    over, inside = P("x", None, None, "y"), P(None, "x")
    for name, (arrays, make) in tried.items():
        expected = jax.jit(make())(arrays)
        runs = [("Auto", over, {}), ("Explicit", over, {}), ("Explicit", inside, {})]
        for kind, spec, options in [*runs, ("Auto", over, {"spmd_axis_name": "x"})]:
            if options and name != "mapped tables":
                continue
            mesh = make_mesh((2, 4), kind)
            is_split = arrays is mapped_x and spec == over
            specs = qkv(spec) | ({"table": P("x")} if is_split else {})
            with jax.set_mesh(mesh):
                got = jax.jit(make(**options))(placed(arrays, mesh, specs))
            found[f"{name}|{kind}|{spec}|{options}"] = error(got, expected)
    return found


def main() -> None:
    found = {"jit": under_jit(), "shard_map": under_shard_map(), "vmap": mapped()}
    print(json.dumps(found | {"captured and sharded": captured_and_sharded()}))


if __name__ == "__main__":
    main()
