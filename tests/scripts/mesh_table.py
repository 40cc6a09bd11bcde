"""Writes the table of docs/bench/meshes.md: the cost of sharded calls, ours and jax.nn's.

It runs on eight virtual devices of the CPU.

usage: python -m tests.scripts.mesh_table [--print]

With --print it prints its results as JSON, which test_meshes.py compares with the page.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.support.page_tables import with_table
from tests.support.repository import DOCS

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
from jax.sharding import PartitionSpec as P

from tests.support import mesh_model
from tests.support.mesh_programs import (
    LAYOUTS,
    PROGRAMS,
    Measurement,
    cells,
    in_shard_map,
    make_mesh,
    measured,
)

DOCUMENT = DOCS / "bench/meshes.md"

_LETTERS = {
    "all-gather": "g", "all-reduce": "r", "all-to-all": "a", "collective-permute": "p",
    "reduce-scatter": "s",
}  # fmt: skip


def measured_jax_nn(program: Any, *args: Any) -> dict[str, Any]:
    if not program.in_jax_nn:
        return {"fails": "no"}
    try:
        return vars(measured(program, *args, jax.nn.dot_product_attention))
    except Exception as error:  # any error means that the call does not run
        return {"fails": type(error).__name__}


def report() -> dict[str, Any]:
    """The measurements of ours and of jax.nn in every cell, and the losses of the model."""
    found: dict[str, Any] = {}
    for layout, name, kind in cells():
        (shape, spec), program = LAYOUTS[layout], PROGRAMS[name]
        mesh = make_mesh(shape, kind)
        found[f"{layout}|{name}|{kind}"] = {
            "ours": vars(measured(program, mesh, spec)),
            "jax.nn": measured_jax_nn(program, mesh, spec),
        }
    manual = {"all axes": {"x", "y"}, "x alone": {"x"}}
    for name in ("N 8, K 4", "N 8, K 2"):
        program, spec = PROGRAMS[name], P("x", None, "y")
        for kind in ("Auto", "Explicit"):
            for which, axes in manual.items():
                if len(axes) == 2 and program.kv_heads % 4:
                    continue  # a shard_map cannot split two kv heads over four devices
                mesh = make_mesh((2, 4), kind)
                found[f"shard_map over {which}|{name}|{kind}"] = {
                    "ours": vars(_in_shard_map(program, mesh, spec, axes)),
                    "jax.nn": _jax_nn_in_shard_map(program, mesh, spec, axes),
                }
    return {"cells": found, "losses": model_losses()}


def _in_shard_map(program: Any, mesh: Any, spec: P, axes: set[str], **kwargs: Any) -> Measurement:
    wrapped = in_shard_map(mesh, spec, program, axes)
    return measured(program, mesh, spec, wrapped=wrapped, **kwargs)


def _jax_nn_in_shard_map(program: Any, mesh: Any, spec: P, axes: set[str]) -> dict[str, Any]:
    try:
        attention = jax.nn.dot_product_attention
        return vars(_in_shard_map(program, mesh, spec, axes, attention=attention))
    except Exception as error:
        return {"fails": type(error).__name__}


def model_losses() -> dict[str, list[float]]:
    meshes = {"data": ("x", None), "tensor": (None, "y"), "data and tensor": ("x", "y"),
              "FSDP": (("x", "y"), None)}  # fmt: skip
    losses = {}
    for kv_heads in (4, 2):
        losses[f"one device|{kv_heads}"] = mesh_model.losses(kv_heads)
        for name, (batch, tensor) in meshes.items():
            for kind in ("Auto", "Explicit"):
                mesh = make_mesh((2, 4), kind)
                key = f"{name}, {kind}|{kv_heads}"
                losses[key] = mesh_model.losses(kv_heads, mesh, batch, tensor)
    return losses


def document(report: dict[str, Any]) -> str:
    """The page with this table between its markers."""
    lines = ["| arrays sharded along | call | axes | ours | jax.nn |", "|---|---|---|---|---|"]
    for label, both in report["cells"].items():
        ours, theirs = _cell(both["ours"]), _cell(both["jax.nn"])
        lines.append("| " + " | ".join([*label.split("|"), ours, theirs]) + " |")
    return with_table(DOCUMENT, "mesh_table", lines)


def _cell(found: dict[str, Any]) -> str:
    if "fails" in found:
        return "no" if found["fails"] == "no" else "fails"
    counts = (f"{n} {_LETTERS[name]}" for name, n in found["collectives"].items())
    return ", ".join([f"{found['share']:.2f}", *counts])


def main() -> None:
    found = report()
    if "--print" in sys.argv:
        print(json.dumps(found))
    else:
        DOCUMENT.write_text(document(found))


if __name__ == "__main__":
    main()
