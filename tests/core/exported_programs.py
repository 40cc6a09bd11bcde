"""Run programs that were exported, or lowered without devices, on 8 devices: a child process.

usage: exported_programs.py FOLDER, with NAME.bin and arrays.npz in it; prints JSON with the largest
difference of each result from plain attention in float64 on one device.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import dot_product_attention

SIZES, NAMES = (4, 2), ("d", "m")
BY_HEAD = P("d", None, "m")
SPECS = (BY_HEAD, BY_HEAD, BY_HEAD, P(None, "m"), P("d"))
"""The shardings of query, key, value, bias and lengths."""
KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


def attend(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    return dot_product_attention(
        q, k, v, bias=bias, key_value_seq_lengths=lengths, is_causal=True
    )  # fmt: skip


def attend_by_definition(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
    t, s = (jnp.arange(n) for n in scores.shape[2:])
    mask = (s <= t[:, None]) & (s < lengths[:, None, None, None])
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)


def results(call: Any, *arrays: Any) -> dict[str, Any]:
    """The output, its gradients, and the gradient of a gradient."""
    lengths = arrays[-1]

    def loss(*moving: Any) -> jax.Array:
        return (call(*moving, lengths) ** 2).sum()

    def slope(query: Any) -> jax.Array:
        return (jax.grad(loss)(query, *arrays[1:-1]) ** 2).sum()

    return {
        "out": call(*arrays),
        "gradients": jax.grad(loss, (0, 1, 2, 3))(*arrays[:-1]),
        "second": jax.grad(slope)(arrays[0]),
    }


def exported_results(exported: Any, mesh: Mesh, *arrays: Any) -> dict[str, Any]:
    """`results` by the exported program and its exported derivatives, from and to NumPy.

    JAX does not recognise the mesh of an export with Explicit axes as the one that it runs on: it
    can neither differentiate `exported.call` nor compute with its results in one program.
    """

    def run(program: Any, *given: Any) -> list[Any]:
        placed = [
            x if to is None or x.dtype == jax.dtypes.float0 else jax.device_put(x, to)
            for x, to in zip(given, program.in_shardings_jax(mesh), strict=True)
        ]
        with jax.set_mesh(mesh):
            return [np.asarray(x) for x in jax.tree.leaves(jax.jit(program.call)(*placed))]

    first, second = exported.vjp(), exported.vjp().vjp()
    (out,) = run(exported, *arrays)
    gradients = run(first, *arrays, 2 * out)
    by_gradients = [2 * gradients[0], *(np.zeros_like(x) for x in gradients[1:4])]
    no_gradient = [np.zeros(x.shape, jax.dtypes.float0) for x in arrays[4:]]
    by_query, *_, by_out_grad = run(second, *arrays, 2 * out, *by_gradients, *no_gradient)
    through_out = run(first, *arrays, 2 * by_out_grad)[0]
    return {"out": out, "gradients": tuple(gradients[:4]), "second": by_query + through_out}


def errors(found: Any, expected: Any) -> dict[str, float]:
    """The largest difference, as a share of the largest number."""
    return {
        name: max(
            float(np.abs(np.asarray(x) - y).max() / np.abs(y).max())
            for x, y in zip(jax.tree.leaves(found[name]), jax.tree.leaves(y), strict=True)
        )
        for name, y in expected.items()
    }


def gather_count(program: Any) -> int:
    return len(re.findall(r" all-gather(?:-start)?\(", program.as_text()))


def main(folder: pathlib.Path) -> None:
    arrays = list(np.load(folder / "arrays.npz").values())
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, np.float64) if x.dtype == np.float32 else x for x in arrays]
        exact = jax.tree.map(np.asarray, jax.jit(partial(results, attend_by_definition))(*wide))
    report: dict[str, Any] = {}
    devices = np.array(jax.devices())
    for name, kind in KINDS.items():
        mesh = Mesh(devices.reshape(SIZES), NAMES, axis_types=(kind,) * 2)
        exported = jax.export.deserialize(bytearray((folder / f"{name}.bin").read_bytes()))
        report[f"{name} exported"] = errors(exported_results(exported, mesh, *arrays), exact)
    # Lowered without devices, then compiled for these devices in two orders.
    abstract = AbstractMesh(SIZES, NAMES, axis_types=(AxisType.Auto,) * 2)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(abstract, spec))
        for x, spec in zip(arrays, SPECS, strict=True)
    ]
    both = jax.jit(lambda *x: jax.value_and_grad(lambda q: (attend(q, *x[1:]) ** 2).sum())(x[0])[1])
    on: list[NamedSharding] = []
    lowered = both.trace(*shapes).lower(lowering_platforms=("cpu",))
    for name, order in {"first": devices, "reversed": devices[::-1]}.items():
        compiled = lowered.compile(device_assignment=tuple(order))
        mesh = Mesh(order.reshape(SIZES), NAMES, axis_types=(AxisType.Auto,) * 2)
        on = [NamedSharding(mesh, spec) for spec in SPECS]
        given = [jax.device_put(x, to) for x, to in zip(arrays, on, strict=True)]
        found = {"gradient": compiled(*given)}
        report[f"{name} lowered"] = errors(found, {"gradient": exact["gradients"][0]})
        report[f"{name} gathers"] = gather_count(compiled)
        # The same jitted function, called with arrays on these devices.
        report[f"{name} jitted"] = errors({"gradient": both(*given)}, found)
    # The mesh is known only from in_shardings, not from the arrays' types.
    host = [jnp.asarray(x) for x in arrays]
    compiled = jax.jit(both, in_shardings=on).lower(*host).compile()
    report["in_shardings gathers"] = gather_count(compiled)
    print(json.dumps(report))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
