"""Programs whose calls exchange arrays between devices: what `explain_program` lists of them, and
what is in the compiled programs; prints JSON.

This is a separate process, because the number of devices is fixed when a process starts.

usage: exchanging_programs.py [FOLDER], with jax-cuda13-plugin and jax-cuda13-pjrt in it: then XLA
compiles for H100s that are not there
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

if __name__ == "__main__":  # tests import constants from here, in a process with one device
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # CUDA's own libraries are not needed
    sys.path[:0] = sys.argv[1:]

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import (
    context_parallel,
    dot_product_attention,
    explain_program,
    paged_attention,
    target,
)
from attn_dispatch.core import primitive
from attn_dispatch_tools.reports.exchanged import sent
from tests.support.optimized_hlo import in_all
from tests.support.present import present

T, DIM, DEVICES = 64, 4, 8
HEADS, LAYERS = 12, 3

Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""

CAUSAL: dict[str, Any] = {"is_causal": True}
PACKED: dict[str, Any] = {"is_causal": True, "max_segments": 2}


@dataclass(frozen=True)
class Case:
    """A call whose rows or keys are spread over eight devices."""

    strategy: Any
    how: str
    """"Auto", "Explicit", or the order of rows in a shard_map."""
    heads: tuple[int, int] = (3, 1)
    options: dict[str, Any] = field(default_factory=lambda: CAUSAL)
    mesh: tuple[int, ...] = (DEVICES,)
    queries: int = T

    @property
    def is_in_shard_map(self) -> bool:
        return self.how not in ("Auto", "Explicit")

    @property
    def axes(self) -> tuple[str, ...]:
        return ("context",) if len(self.mesh) == 1 else ("ring", "heads")


WINDOW = CAUSAL | {"local_window_size": (5, 0)}
CASES = {
    "heads, few of keys": Case("heads", "Auto", (8, 2)),
    "heads, packed": Case("heads", "Explicit", (8, 8), PACKED),
    "heads, zigzag": Case("heads", "zigzag", (8, 2), PACKED),
    "heads+ring": Case("ring", "Auto", (HEADS, HEADS), mesh=(2, 4)),
    "ring": Case("ring", "Auto"),
    "ring, Explicit": Case("ring", "Explicit", options={}),
    "ring, documents": Case("ring", "documents", options=PACKED),
    "gather, packed": Case("gather", "contiguous", options=PACKED),
    "halo": Case("halo", "Explicit", options=WINDOW),
    "halo, packed": Case("halo", "contiguous", options=WINDOW | PACKED),
    "cache": Case("auto", "Auto", options={}, queries=1),
}


STEPS = {
    "step, heads": Case("heads", "Auto", (8, 8)),
    "step, ring": Case("ring", "Auto", (2, 2)),
}
ON_GPUS = ("heads, few of keys", "heads, zigzag", "gather, packed", "halo", "cache")
"""Rings are compiled for GPUs in tests/core/context/sent_by_gpus.py."""
PAGES = Case("auto", "Explicit")


def mesh_of(case: Case, devices: Any = None) -> Any:
    """The mesh of some devices, or of none."""
    kinds = (AxisType.Explicit if case.how == "Explicit" else AxisType.Auto,) * len(case.mesh)
    if devices is None:
        return AbstractMesh(case.mesh, case.axes, axis_types=kinds)
    return Mesh(np.reshape(devices, case.mesh), case.axes, axis_types=kinds)


def function(case: Case, mesh: Any) -> Callable[..., Any]:
    """The call, as a function of query, key, value and segment ids."""
    options = dict(case.options)
    if case.is_in_shard_map:
        options |= {"context_axis": case.axes, "sequence_order": case.how}

    def call(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
        given = {"query_segment_ids": ids} if "max_segments" in options else {}
        return dot_product_attention(q, k, v, **given, **options)

    if case.is_in_shard_map:
        rows = P(None, case.axes)
        return jax.shard_map(call, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows)
    return call


def placed(case: Case, mesh: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """An array on the devices whose rows, keys or heads it has."""
    axes = {T: "context"} if len(case.mesh) == 1 else {T: "ring", HEADS: "heads"}
    spec = [axes.get(size) for size in x.shape]
    if case.is_in_shard_map and T not in x.shape:  # what a shard_map returns of every device
        spec = ["context" if size == DEVICES else None for size in x.shape[:1]]
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec)))


def arrays(case: Case, mesh: Any, dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    """query, key, value and segment ids."""

    def struct(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return placed(case, mesh, jax.ShapeDtypeStruct(shape, dtype))

    heads, kv_heads = case.heads
    key = struct(1, T, kv_heads, DIM)
    return [struct(1, case.queries, heads, DIM), key, key, struct(1, T, dtype=jnp.int32)]


def programs(case: Case, mesh: Any, dtype: Any) -> dict[str, Program]:
    """The forward pass, and the backward pass from what the forward pass kept."""
    *given, ids = arrays(case, mesh, dtype)
    call = function(case, mesh)

    def forward(*given: Any) -> Any:
        return call(*given)

    def pullback(*given: Any) -> Any:
        return jax.vjp(lambda *x: call(*x, given[-1]), *given[:-1])[1]

    pull = jax.eval_shape(pullback, *given, ids)
    pull = jax.tree.map(partial(placed, case, mesh), pull)
    return {
        "forward": (forward, (*given, ids)),
        "backward": (lambda pull, x: pull(x), (pull, given[0])),
    }


def listed(function: Any, args: Any) -> list[dict[str, Any]]:
    def row(x: Any) -> dict[str, Any]:
        share = present(x.share)
        return {
            "call": str(x.explanation.call),
            "runs": [x.forward_runs.times, x.backward_runs.times],
            "received": [share.received_bytes, share.received_bytes_backward],
            "share": str(share),
        }

    return [row(x) for x in explain_program(function, *args, target="cpu").calls]


def compiled(function: Any, args: Any, platform: str) -> tuple[float, list[str]]:
    """The bytes that a device sends in the compiled program, and the calls that it computes."""
    specs = set[str]()

    def stand_in(*operands: jax.Array, options: Any, **_: Any) -> list[jax.Array]:
        """Results that depend on all operands, as those of a kernel do, and compile fast."""
        spec = primitive.AttentionSpec.of(operands, options)
        specs.add(str(spec))
        total = sum(jnp.sum(x) for x in operands)
        return [
            (total * jnp.arange(i, x.size + i)).reshape(x.shape).astype(x.dtype)
            for i, x in enumerate(spec.results)
        ]

    with mock.patch.object(primitive, "_compute", stand_in), target("h100"):
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
        text = present(lowered.compile().as_text())
    return in_all(text, lambda x: sent(x, DEVICES)), sorted(specs)


def step(case: Case, mesh: Any) -> Program:
    """The gradient of layers in a scan, each under remat."""
    call = function(case, mesh)

    def layer(x: Any, _: Any) -> Any:
        return x + call(jnp.sin(x), jnp.cos(x), jnp.tanh(x), None), None

    def loss(x: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), x, length=LAYERS)[0].sum()

    return jax.grad(loss), (arrays(case, mesh)[0],)


def paged(mesh: Any) -> Program:
    """A step of decoding, whose pool of pages is spread."""

    def struct(*shape: int, dtype: Any = jnp.float32, axis: str | None = None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(axis)))

    def decode(query: Any, pool: Any, table: Any, lengths: Any) -> jax.Array:
        return paged_attention(query, pool, pool, page_table=table, key_value_seq_lengths=lengths)

    pool = struct(64, 16, 1, DIM, axis="context")
    table, lengths = (struct(*x, dtype=jnp.int32) for x in ((2, 8), (2,)))
    return decode, (struct(2, 1, 4, DIM), pool, table, lengths)


def all_programs(mesh: Callable[[Case], Any]) -> Iterator[tuple[str, Case, Program]]:
    for name, case in CASES.items():
        for direction, program in programs(case, mesh(case), jnp.float32).items():
            yield f"{name}|{direction}", case, program
    for name, case in STEPS.items():
        yield name, case, step(case, mesh(case))
    yield "pages", PAGES, paged(mesh(PAGES))


def gpu_programs(mesh: Callable[[Case], Any]) -> Iterator[tuple[str, Case, Program]]:
    for name in ON_GPUS:
        case = CASES[name]
        for direction, program in programs(case, mesh(case), jnp.bfloat16).items():
            yield f"{name}|{direction}", case, program


def report(*folder: str) -> dict[str, Any]:
    """What is listed on a mesh that exists and one that does not, and what is compiled."""
    chosen, platform, devices = all_programs, "cpu", jax.devices()
    if folder:
        from tests.whole_programs.compiled_programs import H100  # which expects the folder too

        chosen, platform = gpu_programs, "cuda"
        topology = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x8")
        devices = topology.devices
    found = {}
    here, elsewhere = chosen(partial(mesh_of, devices=devices)), chosen(mesh_of)
    for (name, case, program), (*_, abstract) in zip(here, elsewhere, strict=True):
        with context_parallel(case.strategy):
            with jax.sharding.use_abstract_mesh(mesh_of(case)):
                there = listed(*abstract)
            with jax.set_mesh(mesh_of(case, devices)):
                number, calls = compiled(*program, platform)
                found[name] = {
                    "listed": listed(*program), "elsewhere": there, "sent": number,
                    "compiled": calls,
                }  # fmt: skip
    return found


if __name__ == "__main__":
    print(json.dumps(report(*sys.argv[1:])))
