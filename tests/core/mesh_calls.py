"""Run the sharded calls that docs/bench/meshes.md does not list, and print the errors as JSON.

This is a separate process, because the number of devices is fixed when a process starts.

usage: python -m tests.core.mesh_calls [--cache FOLDER]
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from functools import partial
from typing import Any
from unittest import mock

from tests.support.option_parts import options_with

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import attn_dispatch
from attn_dispatch.call.leading import LeadingCall
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core import primitive
from attn_dispatch.core.shards import own_operands
from attn_dispatch.core.splitting import split
from attn_dispatch.devices.target import device_for
from attn_dispatch.semantics.kernel_seed import kernel_seed
from tests.support.mesh_programs import COLLECTIVES, make_mesh

attention = partial(attn_dispatch.dot_product_attention, is_causal=True)


def arrays(leading: tuple[int, ...], heads: int = 8, kv_heads: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((*leading, 32, n, 8)).astype(np.float32)
        for n in (heads, kv_heads, kv_heads)
    ]


def placed(operands: list[np.ndarray], mesh: jax.sharding.Mesh, spec: P) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in operands]


def error(got: Any, expected: Any) -> float:
    differences = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), *jax.device_get((got, expected)))
    return float(max(jax.tree.leaves(differences)))


def several_dims() -> dict[str, float]:
    """Calls with several leading dims, some sharded, as batch dims and under vmap, with dropout."""
    found = {}
    dropping = partial(attention, dropout_rate=0.4, dropout_key=jax.random.key(3))
    for spec, leading in (
        (P(None, "x", None, "y"), (3, 4)), (P("x", "y"), (2, 8)), (P("x", None, "y"), (2, 3, 4)),
    ):  # fmt: skip
        for how, f in (("dims", dropping), ("vmap", jax.vmap(dropping))):
            run, operands = jax.jit(partial(_both, f)), arrays(leading)
            expected = run(*operands)
            for kind in ("Explicit", "Auto"):
                mesh = make_mesh((2, 4), kind)
                with jax.set_mesh(mesh):
                    got = run(*placed(operands, mesh, spec))
                found[f"{kind} {spec} {how}"] = error(got, expected)
    return found


def mapped_calls() -> dict[str, float]:
    """Calls mapped over an unsharded or a sharded dim, sharing some operands."""
    keys = jax.random.split(jax.random.key(3), 2)
    bias = np.random.default_rng(1).standard_normal((1, 8, 32, 32)).astype(np.float32)
    found = {}
    # Axes of query, key, value, bias and the dropout key.
    for spec, axes in (
        (P(None, "y"), (0, 0, 0, None, 0)), (P("x", "y"), (0, None, None, None, None)),
        (P("x", None, None, "y"), (None, 0, 0, None, 0)),
    ):  # fmt: skip
        is_mapped = [axis == 0 for axis in axes]
        qkv = [x if m else x[0] for x, m in zip(arrays((2, 4)), is_mapped, strict=False)]
        operands = [*qkv, bias, keys if is_mapped[-1] else keys[0]]
        specs = [spec if m else P(*spec[1:]) for m in is_mapped[:3]]
        specs += [P(), P(spec[0]) if is_mapped[-1] else P()]
        run = jax.jit(partial(_mapped_both_ways, axes))
        expected = run(*operands)
        for kind in ("Explicit", "Auto"):
            mesh = make_mesh((2, 4), kind)
            with jax.set_mesh(mesh):
                given = (placed([x], mesh, y)[0] for x, y in zip(operands, specs, strict=True))
                got = run(*given)
            found[f"{kind} {spec} {axes}"] = error(got, expected)
    return found


def _mapped_both_ways(axes: tuple[int | None, ...], *operands: Any) -> Any:
    """Gradients of the mapped call, and the mapped gradients of each call."""

    def call(*operands: Any) -> jax.Array:
        *floats, key = operands
        return attention(*floats, dropout_rate=0.4, dropout_key=key)

    def gradients(*operands: Any) -> Any:
        *floats, key = operands
        return _both(lambda *x: call(*x, key), *floats)

    *floats, key = operands
    outside = _both(lambda *x: jax.vmap(call, in_axes=axes)(*x, key), *floats)
    return outside, jax.vmap(gradients, in_axes=axes)(*operands)


def split_axes() -> dict[str, Any]:
    """A sharded batch reshaped to two dims, so that a part of the mesh axis shards each dim."""
    found = {}
    for shape, spec in (((8,), P("x")), ((2, 4), P(("x", "y")))):
        mesh = make_mesh(shape, "Auto")
        for dims in ((2, 4), (4, 2), (4, 6)):
            operands = arrays((dims[0] * dims[1],))

            def call(*operands: Any, dims=dims) -> jax.Array:
                out = jax.vmap(attention)(*(x.reshape(*dims, *x.shape[1:]) for x in operands))
                return out.reshape(operands[0].shape)

            run = jax.jit(partial(_both, call))
            compiled = run.lower(*placed(operands, mesh, spec)).compile()
            text = compiled.as_text() or ""
            found[f"{spec} {dims}"] = {
                "error": error(compiled(*placed(operands, mesh, spec)), run(*operands)),
                "collectives": [x for x in COLLECTIVES if f" {x}" in text],
            }
    return found


def _both(f: Any, *operands: Any) -> Any:
    """The result of f and its gradients."""
    out, pull = jax.vjp(f, *operands)
    return out, pull(jnp.sin(out))


def derivatives() -> dict[str, float]:
    """The relative error of each kind of derivative other than one reverse pass."""

    def loss(*operands: jax.Array) -> jax.Array:
        return (attention(*operands) ** 2).sum()

    def along(*operands: jax.Array) -> Any:
        return jax.jvp(attention, operands, operands)[1]

    def second_along(*operands: jax.Array) -> Any:
        return jax.jvp(jax.grad(loss, (0, 1, 2)), operands, operands)[1]

    def mapped(*operands: jax.Array) -> Any:
        times = jnp.arange(1.0, 3.0)[:, None, None, None, None]
        tangents = [x * times for x in operands]
        return jax.vmap(lambda *x: jax.jvp(jax.grad(loss, (0, 1, 2)), operands, x)[1])(*tangents)

    def squared(f: Any) -> Any:
        return jax.grad(lambda *x: sum((y**2).sum() for y in jax.tree.leaves(f(*x))), (0, 1, 2))

    kinds = {
        "forward": along, "forward of reverse": second_along, "mapped": mapped,
        "reverse of forward": squared(along), "reverse of reverse": squared(jax.grad(loss)),
        "third": squared(second_along),
    }  # fmt: skip
    operands, found = arrays((4,)), {}
    for name, f in kinds.items():
        run = jax.jit(f)
        expected = run(*operands)
        largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
        for kind in ("Explicit", "mixed", "Auto"):
            mesh = make_mesh((2, 4), kind)
            with jax.set_mesh(mesh):
                got = run(*placed(operands, mesh, P("x", None, "y")))
            found[f"{kind} {name}"] = error(got, expected) / largest
    return found


def exported() -> dict[str, Any]:
    found = {}
    for kind in ("Explicit", "Auto"):
        operands = placed(arrays((4,)), make_mesh((2, 4), kind), P("x", None, "y"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            written = export.export(jax.jit(attention))(*operands).serialize()
        again = jax.jit(export.deserialize(written).call)(*operands)
        found[kind] = {
            "error": error(again, attention(*arrays((4,)))),
            "warned": [x.category.__name__ for x in caught],
        }
    return found


def unsplit_warnings() -> dict[str, list[str]]:
    """Warnings about a call that 8 devices along its length cannot split: 4 heads, a batch of 2.

    Rows are not split in calls with dropout.
    """
    found = {}
    dropped = partial(attention, dropout_rate=0.5, dropout_key=jax.random.key(0))
    for kind in ("Explicit", "Auto"):
        operands = placed(arrays((2,), 4, 4), make_mesh((8,), kind), P(None, "x"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                jax.jit(lambda *x: dropped(*x))(*operands)
        found[kind] = [str(x.message) for x in caught]
        attn_dispatch.warning.forget()  # pyright: ignore[reportAttributeAccessIssue]
    return found


def gather_warnings() -> dict[str, list[str]]:
    """Warnings of calls and gradients on a mesh whose axis "y" shards keys or pages in some way."""

    def both(f: Any) -> Any:
        return jax.value_and_grad(lambda *x: f(*x).sum(), (0, 1, 2))

    def paged(q: Any, k: Any, v: Any) -> jax.Array:
        table, lengths = jnp.zeros((4, 8), jnp.int32), jnp.full(4, 9, jnp.int32)
        return attn_dispatch.paged_attention(q, k, v, table, lengths)

    decode, keys, pages = (4, 1, 8, 8), (4, 32, 4, 8), (8, 4, 4, 8)
    batch, rows, heads = P("x"), P("x", "y"), P("x", None, "y")
    cases = {
        "keys": (both(attention), batch, decode, rows, keys),
        "heads": (both(attention), heads, decode, heads, keys),
        "exchanged": (both(attention), rows, (4, 32, 8, 8), rows, keys),
        "few kv heads": (both(attention), rows, (4, 32, 8, 8), rows, (4, 32, 2, 8)),
        "pages": (paged, batch, decode, P("y"), pages),
        "heads of pages": (paged, batch, decode, P(None, None, "y"), pages),
    }
    found = {}
    for kind in ("Explicit", "Auto"):
        mesh = make_mesh((2, 4), kind)
        for name, (f, of_query, query, of_keys, shape) in cases.items():
            operands = [np.ones(x, np.float32) for x in (query, shape, shape)]
            specs = (of_query, of_keys, of_keys)
            given = [placed([x], mesh, to)[0] for x, to in zip(operands, specs, strict=True)]
            heads_alone = attn_dispatch.context_parallel("heads")
            with warnings.catch_warnings(record=True) as caught, jax.set_mesh(mesh), heads_alone:
                warnings.simplefilter("always")
                jax.jit(f).lower(*given).compile()
            found[f"{kind} {name}"] = [
                f"{x.filename}: {x.message}"
                for x in caught
                if x.category is attn_dispatch.AttentionShardingWarning
            ]
            attn_dispatch.warning.forget()  # pyright: ignore[reportAttributeAccessIssue]
    return found


def settings_in_force() -> dict[str, list[bool]]:
    """True where settings of a `with` block hold, even for what is compiled after the block."""
    with attn_dispatch.target("gfx942"):
        gpu = device_for("rocm")

    def is_refused(lowered: Any) -> bool:
        try:
            lowered().compile()
        except Exception as error:
            return "attention falls back to xla" in str(error)
        return False

    found: dict[str, list[bool]] = {}
    with mock.patch.object(primitive, "device_for", lambda platform: gpu):
        for kind in ("Explicit", "Auto"):
            operands = placed(arrays((4,)), make_mesh((2, 4), kind), P("x", None, "y"))

            def refused(call: Any = attention, operands: Any = operands) -> bool:
                return is_refused(lambda: jax.jit(lambda *x: call(*x)).lower(*operands))

            with attn_dispatch.fallback("error"):
                is_error = refused()
                with attn_dispatch.fallback("silent"):
                    is_silent = not refused()
            with attn_dispatch.fallback("error"):

                def late(operands: Any = operands) -> Any:
                    with attn_dispatch.fallback("silent"):
                        return jax.jit(lambda *x: attention(*x)).lower(*operands)

                found[kind] = [is_error, is_silent, not is_refused(late)]
    return found


def nested() -> float:
    """A shard_map over one axis inside another one; JAX 0.10 cannot differentiate it."""
    mesh = make_mesh((2, 4), "Auto")
    heads = P(None, None, "y")

    def inner(*operands: Any) -> Any:
        return jax.shard_map(
            attention, in_specs=(heads,) * 3, out_specs=heads, axis_names={"y"}
        )(*operands)  # fmt: skip

    outer = jax.shard_map(
        inner, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"), axis_names={"x"}
    )
    return error(jax.jit(outer)(*arrays((4,))), attention(*arrays((4,))))


def unsharded_under_mesh() -> float:
    """A call, its gradient and a mapped call with arrays on one device, while a mesh is set."""
    operands = [jnp.asarray(x) for x in arrays((4,))]

    def gradient(*operands: Any) -> Any:
        return jax.grad(lambda *x: jnp.sum(attention(*x) ** 2), (0, 1))(*operands)

    def made_inside() -> jax.Array:
        return attention(*(jnp.ones_like(x) for x in operands))

    mapped = jax.vmap(lambda *x: attention(*x))
    found = []
    for function in (attention, gradient, mapped):
        expected = function(*operands)
        for kind in ("Auto", "Explicit"):
            with jax.set_mesh(make_mesh((2, 4), kind)):
                found += [error(f(*operands), expected) for f in (jax.jit(function), function)]
                jax.jit(made_inside)()
    return max(found)


def seeds() -> int:
    """The number of different dropout keys that a kernel gets on the devices of a mesh."""
    mesh = make_mesh((2, 4), "Auto")
    options = options_with(
        operands=("query", "key", "value", "dropout_key"), scale=1.0, dropout_rate=0.5,
        dropout_impl="threefry2x32",
    )  # fmt: skip
    operands = (*arrays((4,)), np.array([[1, 2]], np.uint32))
    call = LeadingCall.of(operands, options)
    shards = split(call, mesh.shape, P("x", None, "y"), P("x", None, "y"))

    def seed() -> jax.Array:
        local_options, local = own_operands(
            shards, call, [jnp.asarray(x) for x in operands], shards.begin(call)
        )
        by_name = dict(zip(local_options.operands, local, strict=True))
        return kernel_seed(AttentionSpec.of(local, local_options), by_name)[None]

    found = jax.shard_map(seed, mesh=mesh, in_specs=(), out_specs=P(("x", "y")), check_vma=False)
    return len({tuple(x) for x in np.asarray(jax.jit(found)()).tolist()})


def cache_hits(folder: str) -> dict[str, Any]:
    """Two calls of the same shapes: sums of their results, True for each cache hit, and names."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    found: dict[str, Any] = {"hits": {}, "sums": {}, "names": []}
    for kind in ("Explicit", "Auto"):
        operands = placed(arrays((4,)), make_mesh((2, 4), kind), P("x", None, "y"))
        found["hits"][kind], found["sums"][kind] = [], []
        for window in (None, 3):
            call = jax.jit(lambda *x, window=window: attention(*x, local_window_size=window))
            lowered = call.lower(*operands)
            found["names"] += re.findall(r'attn_dispatch = "([^"]*)"', lowered.as_text())
            events.clear()
            compiled = lowered.compile()
            found["hits"][kind].append(any(x.endswith("cache_hits") for x in events))
            out = np.asarray(jax.device_get(compiled(*operands)))
            found["sums"][kind].append(float(np.abs(out).sum()))
    return found


def main() -> None:
    if "--cache" in sys.argv:
        print(json.dumps(cache_hits(sys.argv[-1])))
        return
    found = {
        "dims": several_dims(), "mapped": mapped_calls(), "cut": split_axes(), "export": exported(),
        "derivatives": derivatives(),
        "unsplit": unsplit_warnings(),
        "gathers": gather_warnings(), "nested": nested(), "seeds": seeds(),
        "unsharded": unsharded_under_mesh(), "settings": settings_in_force(),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
