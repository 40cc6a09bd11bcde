"""Training steps compiled for an H100 that is not there: where they make the arrays of masks.

It prints JSON: for each program, how many operations of lists are inside of loops and outside, and
which calls of FlashAttention-4 are inside.

usage: hoisted_mask_arrays.py FOLDER, with jax-cuda13-plugin and jax-cuda13-pjrt in it
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # CUDA's own libraries are not needed
sys.path.insert(0, sys.argv[1])

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.cpu import _lapack

from attn_dispatch import dot_product_attention
from attn_dispatch.core import primitive
from attn_dispatch.devices import clear_rows
from attn_dispatch.fa4 import compiled
from tests.support.fa4_on_cpu import LIBRARY, for_h200
from tests.support.made_arrays import KEEPS
from tests.support.optimized_hlo import in_loops
from tests.whole_programs.compiled_programs import H100

LAYERS, BATCH, TOKENS, HEADS, DIM = 4, 2, 512, 2, 64
_MAKES_LISTS = re.compile(r" popcnt\(")
_RUNS = re.compile(r'custom_call_target="attn_dispatch_fa4_(forward|backward)"')


def options_of(mask: str, ids: jax.Array) -> dict[str, Any]:
    if mask == "causal":
        return {"is_causal": True}
    same = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    return {"is_causal": True, "max_segments": 8, **same}


def step_of(mask: str, keep: str) -> Any:
    def layer(x: Any, weight: Any, ids: Any) -> Any:
        q, k, v = jnp.einsum("bthd,wde->wbthe", x, weight)
        out = dot_product_attention(q, k, v, implementation="fa4", **options_of(mask, ids))
        return x + jnp.tanh(out)

    def loss(weights: Any, x: Any, ids: Any) -> Any:
        def step(x: Any, weight: Any) -> Any:
            return KEEPS[keep](layer)(x, weight, ids), None

        return jax.lax.scan(step, x, weights)[0].astype(jnp.float32).sum()

    return jax.grad(loss)


def optimized(step: Any, sharding: NamedSharding) -> str:
    """The optimized HLO of a training step."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arrays = (
        array(LAYERS, 3, DIM, DIM),
        array(BATCH, TOKENS, HEADS, DIM),
        array(BATCH, TOKENS, dtype=jnp.int32),
    )
    lowered = jax.jit(step).trace(*arrays).lower(lowering_platforms=("cuda",))
    text = lowered.compile().as_text()
    assert text is not None
    return text


def found(step: Any, mesh: Mesh) -> dict[str, Any]:
    inside, outside = in_loops(optimized(step, NamedSharding(mesh, P())))
    return {
        "lists inside": sum(bool(_MAKES_LISTS.search(x)) for x in inside),
        "lists outside": sum(bool(_MAKES_LISTS.search(x)) for x in outside),
        "calls": sorted(m[1] for x in inside if (m := _RUNS.search(x))),
    }


MASKS = ("causal", "documents")


def main() -> None:
    description = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x2")
    mesh = Mesh(np.array(description.devices[:1]), ("data",), axis_types=(AxisType.Auto,))
    handler = next(x for name, x in _lapack.registrations().items() if name.endswith("_ffi"))
    for target in (compiled.FORWARD_TARGET, compiled.BACKWARD_TARGET, clear_rows.TARGET):
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")
    report = {}
    with pytest.MonkeyPatch.context() as patch, for_h200():
        patch.setattr(compiled, "find", lambda: LIBRARY)
        for mask in MASKS:
            for keep in KEEPS:
                report[f"{mask}, {keep}"] = found(step_of(mask, keep), mesh)
            with patch.context() as unbound:
                unbound.setattr(primitive, "tiles_to_bind", lambda options, operands: None)
                report[f"{mask}, not bound"] = found(step_of(mask, "remat"), mesh)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
