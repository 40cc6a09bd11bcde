"""Writes docs/meshes.md: what a sharded call costs, beside jax.nn's, on eight virtual CPU devices.

usage: PYTHONPATH=tests python tests/mesh_table.py [--print]

test_meshes.py has it print what it found, and compares the page with that.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
from jax.sharding import PartitionSpec as P

import mesh_model
from mesh_programs import LAYOUTS, PROGRAMS, Found, cells, in_shard_map, make_mesh, measured

DOCUMENT = Path(__file__).parents[1] / "docs" / "meshes.md"

INTRO = """\
# Meshes

A call is split along batch and heads. A mesh axis that shards the sequence is used to split the
heads instead (by an all-to-all), or else the batch. If neither divides evenly, devices compute the
same thing, and an `AttentionShardingWarning` says so once. If an axis has more devices than there
are kv heads, each device takes the kv heads of its own query heads, and the gradients are summed.

- **Explicit axes**, the default of `jax.make_mesh`: the types say how a call is split, and it is
  lowered to a `shard_map`. Results are sharded like query, gradients like their operands. Export
  and the persistent compilation cache work as usual.
- **Auto axes**, and a mesh with both kinds: the partitioner decides, guided by a sharding rule.
  Shard the kv heads along with the query heads if they divide evenly: if they are replicated,
  their gradients may be computed in parts and gathered. Another process finds a program in the
  persistent compilation cache only if `jax_remove_custom_partitioning_ptr_from_cache_key` is set.
  `jax.export` leaves the splitting to XLA, and an `AttentionShardingWarning` says so.
- **Several batch dims, and `vmap`**: any of the dims may be sharded, by axes of its own or, if a
  reshape has split one dim into several, by a part of an axis.
- **Inside `shard_map`** each device makes its own call. If the shard_map is manual over some axes
  only, Auto axes are left to XLA, which gathers the operands of a GPU's kernels; Explicit axes
  split the call as above, but JAX gathers them where the shard_map begins and ends.
- **Dropout**: XLA's mask is the same however a call is split. cuDNN and AITER count rows and heads
  from their own first one, so each device draws from a key of its own, and the mask changes with
  the number of devices; under `attn_dispatch.sharded_dropout("same")` only XLA computes calls with
  dropout. If a batch dim is sharded and one before it is not, and under `vmap`, a call has several
  keys, and XLA computes it. Inside your own `shard_map` the key is yours: fold the device's number
  into it.

The table is made by tests/mesh_table.py on eight virtual CPU devices with JAX 0.10.2;
tests/test_meshes.py compares this page with what it finds now, and every result and gradient with
those of one device.

Below, a call (batch 8, 64 tokens, head dim 16, 8 query heads, float32) and its gradients. The
number is the flops of one device as a fraction of those of the same program on one device alone
(an eighth is 0.125), then the collectives that XLA makes: g all-gather, r all-reduce, a
all-to-all, p collective-permute, s reduce-scatter. Ours first, then that of
`jax.nn.dot_product_attention`: "fails" where it does not compile, "no" where it has no such
argument.
"""

_LETTERS = {
    "all-gather": "g", "all-reduce": "r", "all-to-all": "a", "collective-permute": "p",
    "reduce-scatter": "s",
}  # fmt: skip


def found_of_jax_nn(program: Any, *args: Any) -> dict[str, Any]:
    if not program.in_jax_nn:
        return {"fails": "no"}
    try:
        return vars(measured(program, *args, jax.nn.dot_product_attention))
    except Exception as error:  # whatever it is, it does not run there
        return {"fails": type(error).__name__}


def report() -> dict[str, Any]:
    """Every cell's `Found`, ours and jax.nn's, and the losses of the model."""
    found: dict[str, Any] = {}
    for layout, name, kind in cells():
        (shape, spec), program = LAYOUTS[layout], PROGRAMS[name]
        mesh = make_mesh(shape, kind)
        found[f"{layout}|{name}|{kind}"] = {
            "ours": vars(measured(program, mesh, spec)),
            "jax.nn": found_of_jax_nn(program, mesh, spec),
        }
    manual = {"all axes": {"x", "y"}, "x alone": {"x"}}
    for name in ("N 8, K 4", "N 8, K 2"):
        program, spec = PROGRAMS[name], P("x", None, "y")
        for kind in ("Auto", "Explicit"):
            for which, axes in manual.items():
                if len(axes) == 2 and program.kv_heads % 4:
                    continue  # a shard_map cannot share out two kv heads to four devices
                mesh = make_mesh((2, 4), kind)
                found[f"shard_map over {which}|{name}|{kind}"] = {
                    "ours": vars(_in_shard_map(program, mesh, spec, axes)),
                    "jax.nn": _jax_nn_in_shard_map(program, mesh, spec, axes),
                }
    return {"cells": found, "losses": model_losses()}


def _in_shard_map(program: Any, mesh: Any, spec: P, axes: set[str], **kwargs: Any) -> Found:
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
    """The page."""
    lines = [INTRO]
    lines += ["| arrays sharded along | call | axes | ours | jax.nn |", "|---|---|---|---|---|"]
    for label, both in report["cells"].items():
        ours, theirs = _said(both["ours"]), _said(both["jax.nn"])
        lines.append("| " + " | ".join([*label.split("|"), ours, theirs]) + " |")
    return "\n".join([*lines, ""])


def _said(found: dict[str, Any]) -> str:
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
