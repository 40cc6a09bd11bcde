"""Prints the bytes that four H100s send in a ring, forward and backward in one program, as JSON.

XLA compiles for GPUs that are not there. A list for each order of rows: the bytes that the program
sends, the modelled ones, and those that `explain_program` lists.

usage: sent_by_gpus.py FOLDER, with jax-cuda13-plugin and jax-cuda13-pjrt in it
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # CUDA's own libraries are not needed
sys.path.insert(0, sys.argv[1])

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_dispatch import context_parallel, dot_product_attention, explain_program
from attn_dispatch.call.context import SequenceOrder
from attn_dispatch.core.context.cost import H100 as CHIP
from attn_dispatch.core.context.cost import NVLINK_4, Devices, Hardware, SpreadCall
from attn_dispatch.core.context.strategy_costs import cost
from attn_dispatch_tools.reports.exchanged import sent
from tests.support.present import present
from tests.whole_programs.compiled_programs import H100

DEVICES, LENGTH, HEADS, KV_HEADS, DIM = 4, 1024, 8, 4, 64
ORDERS: tuple[SequenceOrder, ...] = ("zigzag", "documents")
ROWS = P(None, "context")


def program(order: SequenceOrder) -> Any:
    def call(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
        more = {"query_segment_ids": ids, "max_segments": 3} if order == "documents" else {}
        return dot_product_attention(
            q, k, v, is_causal=True, context_axis="context", sequence_order=order,
            implementation="xla", **more,
        )  # fmt: skip

    spread = jax.shard_map(call, in_specs=ROWS, out_specs=ROWS)

    def both(q: Any, k: Any, v: Any, ids: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: spread(q, k, v, ids), q, k, v)
        return out, pull(jnp.cos(out))

    return both


def main() -> None:
    found = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x4").devices
    mesh = Mesh(np.array(found), ("context",), axis_types=(AxisType.Auto,))

    def array(*rest: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, LENGTH, *rest), dtype, sharding=NamedSharding(mesh, ROWS))

    query, key, ids = array(HEADS, DIM), array(KV_HEADS, DIM), array(dtype=jnp.int32)
    report = {}
    for order in ORDERS:
        with jax.set_mesh(mesh), context_parallel("ring"):
            traced = jax.jit(program(order)).trace(query, key, key, ids)
            text = present(traced.lower(lowering_platforms=("cuda",)).compile().as_text())
            (listed,) = explain_program(program(order), query, key, key, ids, target="h100").calls
        share = present(listed.share)
        exchanged = present(share.received_bytes) + present(share.received_bytes_backward)
        call = SpreadCall(1, LENGTH, LENGTH, HEADS, KV_HEADS, DIM, DIM, order=order)
        modelled = cost("ring", call, Hardware(Devices(DEVICES), NVLINK_4, CHIP)).passes()
        report[order] = [sent(text, DEVICES), sum(x.sent for x in modelled), exchanged]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
