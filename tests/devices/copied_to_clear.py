"""Packed programs compiled for an H100 that is not there: what XLA copies so that rows are cleared.

It prints JSON: for each program, how many arrays of queries or keys XLA copies, inside of loops and
outside, and how many custom calls clear rows. For calls with cu_seqlens, also how many kernels XLA
adds to the custom calls.

usage: copied_to_clear.py FOLDER, with jax-cuda13-plugin and jax-cuda13-pjrt in it
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
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

from attn_dispatch import (
    context_parallel,
    dot_product_attention,
    ragged_dot_product_attention,
)
from attn_dispatch.devices import clear_rows
from attn_dispatch.fa4 import compiled
from attn_dispatch.flash import library
from tests.support.fa4_on_cpu import LIBRARY, for_h200
from tests.support.made_arrays import KEEPS
from tests.support.optimized_hlo import in_loops
from tests.whole_programs.compiled_programs import H100

LAYERS, TOKENS, HEADS, KV_HEADS, DIM, MODEL = 3, 2048, 4, 2, 64, 128
IMPLEMENTATIONS = ("fa4", "flash")
_COPIES = re.compile(rf"= bf16\[(?:1,)?{TOKENS},(?:{HEADS}|{KV_HEADS}),{DIM}\]\S* copy\(")
_CLEARS = re.compile(rf'custom_call_target="(?:{"|".join(clear_rows.TARGETS)})"')


def attention(
    implementation: str, q: Any, k: Any, v: Any, ids: Any, *, promised: bool = False
) -> Any:
    return dot_product_attention(
        q, k, v, query_segment_ids=ids, key_value_segment_ids=ids, max_segments=8,
        max_segment_len=TOKENS, is_causal=True, implementation=implementation,
        finite_padding=promised,
    )  # fmt: skip


def ragged(q: Any, k: Any, v: Any, ids: Any) -> Any:
    """A promised call with cu_seqlens, by flash."""
    return ragged_dot_product_attention(
        q[0], k[0], v[0], is_causal=True, cu_seqlens_q=ids, cu_seqlens_kv=ids,
        max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS, implementation="flash", finite_padding=True,
    )[None]  # fmt: skip


def layer(implementation: str, x: Any, weights: Any, ids: Any) -> Any:
    q, k, v = (jnp.einsum("btm,mnd->btnd", x, w) for w in weights[:3])
    return x + jnp.einsum("btnd,mnd->btm", attention(implementation, q, k, v, ids), weights[3])


def both(call: Any, q: Any, k: Any, v: Any, out_grad: Any, ids: Any) -> Any:
    out, pull = jax.vjp(partial(call, ids=ids), q, k, v)
    return out, pull(out_grad)


def gradients(*arguments: Any) -> Any:
    return both(*arguments)[1]


def programs(implementation: str, array: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    ids = array(1, TOKENS, dtype=jnp.int32)
    query, key = (array(1, TOKENS, n, DIM) for n in (HEADS, KV_HEADS))
    x = array(1, TOKENS, MODEL)

    def weights(*leading: int) -> list[Any]:
        return [array(*leading, MODEL, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]

    forward = partial(attention, implementation)
    promised = partial(forward, promised=True)
    yield "the caller's, forward", forward, (query, key, key, ids)
    yield "the caller's, gradients", partial(gradients, forward), (query, key, key, query, ids)
    yield "promised, forward", promised, (query, key, key, ids)
    yield "promised, both", partial(both, promised), (query, key, key, query, ids)

    def loss(x: Any, weights: Any, ids: Any) -> Any:
        return (layer(implementation, x, weights, ids).astype(jnp.float32) ** 2).sum()

    yield "a layer", jax.grad(loss, (0, 1)), (x, weights(), ids)
    for keep in ("no remat", "remat"):

        def of_layers(x: Any, weights: Any, ids: Any, keep: str = keep) -> Any:
            def step(x: Any, weight: Any) -> Any:
                return KEEPS[keep](lambda *x: layer(implementation, *x))(x, weight, ids), None

            return (jax.lax.scan(step, x, weights)[0].astype(jnp.float32) ** 2).sum()

        yield f"a scan, {keep}", jax.grad(of_layers, (0, 1)), (x, weights(LAYERS), ids)


def ragged_programs(array: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    query, key = (array(1, TOKENS, n, DIM) for n in (HEADS, KV_HEADS))
    for count in (8, 64):
        ends = array(count + 1, dtype=jnp.int32)
        yield f"cu_seqlens of {count}, forward", ragged, (query, key, key, ends)
        yield f"cu_seqlens of {count}, both", partial(both, ragged), (query, key, key, query, ends)


def ring(implementation: str, devices: Any) -> tuple[Any, tuple[Any, ...]]:
    """Both passes of a ring over two devices with TOKENS rows each, and its arrays."""
    mesh = Mesh(np.array(devices), ("context",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P(None, "context"))
    shapes = [(1, 2 * TOKENS, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=rows) for x in shapes]
    ids = jax.ShapeDtypeStruct((1, 2 * TOKENS), jnp.int32, sharding=rows)
    spread = partial(
        dot_product_attention, max_segments=8, is_causal=True, implementation=implementation,
        context_axis="context", sequence_order="zigzag",
    )  # fmt: skip

    @partial(jax.shard_map, mesh=mesh, in_specs=rows.spec, out_specs=rows.spec)
    def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return spread(q, k, v, query_segment_ids=ids)

    def gradients(q: Any, k: Any, v: Any, out_grad: Any, ids: Any) -> Any:
        with context_parallel("ring"):
            return jax.vjp(lambda *x: attend(*x, ids), q, k, v)[1](out_grad)

    return gradients, (*arrays, ids)


def compiled_text(program: Any, arrays: tuple[Any, ...]) -> str:
    text = jax.jit(program).trace(*arrays).lower(lowering_platforms=("cuda",)).compile().as_text()
    assert text is not None
    return text


def found(program: Any, arrays: tuple[Any, ...]) -> dict[str, Any]:
    text = compiled_text(program, arrays)
    fusions = re.compile(r"(?ms)^%(?:fused|wrapped)_.*?^\}")
    fused = {x for body in fusions.findall(text) for x in body.splitlines()}
    places = [[x for x in lines if x not in fused] for lines in in_loops(text)]
    return {
        "copies": [sum(bool(_COPIES.search(x)) for x in lines) for lines in places],
        "clears": len(_CLEARS.findall(text)),
    }


def kernels_of_xla(program: Any, arrays: tuple[Any, ...]) -> int:
    text = compiled_text(program, arrays)
    return len(re.findall(r" (?:fusion|copy|reduce)\(", text[text.index("\nENTRY") :]))


def main() -> None:
    description = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x2")
    mesh = Mesh(np.array(description.devices[:1]), ("data",), axis_types=(AxisType.Auto,))

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    handler = next(x for name, x in _lapack.registrations().items() if name.endswith("_ffi"))
    fa4_targets = (compiled.FORWARD_TARGET, compiled.BACKWARD_TARGET)
    for target in (*fa4_targets, *library.TARGETS, *clear_rows.TARGETS):
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")
    with pytest.MonkeyPatch.context() as patch, for_h200():
        patch.setattr(compiled, "find", lambda: LIBRARY)
        patch.setattr(library, "version", lambda: "0.3.6")
        patch.setattr(clear_rows, "_native", lambda: object())
        report = {
            f"{implementation}, {name}": found(program, arrays)
            for implementation in IMPLEMENTATIONS
            for name, program, arrays in programs(implementation, array)
        }
        for name, program, arrays in ragged_programs(array):
            report[name] = {
                **found(program, arrays), "kernels": kernels_of_xla(program, arrays)
            }  # fmt: skip
        for implementation in IMPLEMENTATIONS:
            program, arrays = ring(implementation, description.devices)
            report[f"{implementation}, a ring"] = found(program, arrays)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
