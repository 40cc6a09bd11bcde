"""Times and sizes of the intervals and lists of masks on a GPU.

Those of few tokens are compared with the CPU's.

usage: python -m tests.gpu.mask_times [OUTPUT.json]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch import mods
from attn_dispatch.call.operands import mod_operands
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.programs.tracing import trace
from attn_dispatch.semantics.interval_plan import PlanTiles, lists_bytes, not_supported_reasons
from attn_dispatch.semantics.mask_arrays import MaskArrays
from attn_dispatch.semantics.tile_lists import TileSizes
from attn_dispatch_tools.bench.device_time import busy_seconds
from attn_dispatch_tools.reports.environment import environment
from tests.support.option_parts import options_with

TILES = PlanTiles(TileSizes(128, 128), TileSizes(128, 64))
REPEATS = 20
FEW_TOKENS = 8192
"""So many are compared with the CPU's lists, which takes seconds with more."""

Arrays = dict[str, np.ndarray]


def documents(tokens: int, length: int) -> Arrays:
    ids = (np.arange(tokens, dtype=np.int32) // length + 1)[None]
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def packed(tokens: int, length: int) -> Arrays:
    ends = np.arange(0, tokens + 1, length, dtype=np.int32)[None]
    return {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}


def images(tokens: int) -> np.ndarray:
    """Images of 1,024 tokens, with as many tokens of text between them."""
    block = np.arange(tokens, dtype=np.int32) // 1024
    return np.where(block % 2 == 1, block, 0)


def image_mask(b: Any, n: Any, t: Any, s: Any, groups: Any) -> Any:
    return (s <= t) | ((groups[t] == groups[s]) & (groups[t] > 0))


def sinks(b: Any, n: Any, t: Any, s: Any) -> Any:
    return (s <= t) & ((t - s < 4096) | (s < 64))


def distant(b: Any, n: Any, t: Any, s: Any) -> Any:
    return (s <= t) & ((t - s < 1024) | (s * s < t))


def call(tokens: int, arrays: Arrays | None = None, **facts: Any) -> tuple[AttentionSpec, Arrays]:
    array = jax.ShapeDtypeStruct((1, tokens, 8, 128), jnp.bfloat16)
    shapes: dict[str, Any] = {"query": array, "key": array, "value": array}
    given = shapes | (arrays or {})
    return AttentionSpec.of(list(given.values()), options_with(given, **facts)), arrays or {}


def modified(
    tokens: int, mod: Callable[..., Any], *read: np.ndarray, **facts: Any
) -> tuple[AttentionSpec, Arrays]:
    made = trace("mask_mod", mod, read, "float32")
    names = mod_operands("mask_mod", len(made.arrays))
    arrays = {name: np.asarray(x)[None] for name, x in zip(names, made.arrays, strict=True)}
    arrays["mods_start"] = np.zeros((1, 2), np.int32)
    return call(tokens, arrays, mask_mod=made.program, **facts)


def calls() -> dict[str, tuple[AttentionSpec, Arrays]]:
    """The most tokens first."""
    same = {"is_causal": True, "same_lengths": True}
    million = 2**20
    facts = same | {"max_seq_lens": (8192, 8192)}
    found = {
        "documents of 4096 by ids, 1M": call(
            million, documents(million, 4096), max_segments=4096, **facts
        ),
        "documents of 4096 by cu_seqlens, 1M": call(million, packed(million, 4096), **facts),
        "window 4096, 1M": call(million, is_causal=True, window=(4095, None)),
    }
    for tokens in (131072, 32768, 8192):
        found |= {
            f"causal {tokens}": call(tokens, is_causal=True),
            f"documents of 1024, {tokens}": call(
                tokens, documents(tokens, 1024), max_segments=tokens // 1024, **same
            ),
            f"images, {tokens}": modified(tokens, image_mask, images(tokens)),
        }
    prefix = mods.prefix_lm(np.array([FEW_TOKENS // 4], np.int32))
    return found | {
        f"window 1024, {FEW_TOKENS}": call(FEW_TOKENS, is_causal=True, window=(1023, None)),
        f"prefix 2048, {FEW_TOKENS}": modified(FEW_TOKENS, prefix),
        f"window 4096 and 64 sinks, {FEW_TOKENS}": modified(FEW_TOKENS, sinks),
        f"evaluated, {FEW_TOKENS}": modified(FEW_TOKENS, distant),
    }


def measured(spec: AttentionSpec, arrays: Arrays, *, has_backward: bool) -> dict[str, Any]:
    def make(operands: dict[str, jax.Array]) -> Any:
        forward = MaskArrays.of(spec, operands, TILES.forward)
        if not has_backward:
            return forward.rows.arrays, forward.lists.arrays
        backward = MaskArrays.of(spec.in_training(("query",))[1], operands, TILES.backward)
        return forward.rows.arrays, forward.lists.arrays, backward.lists.arrays

    compiled = jax.jit(make)
    operands = {name: jnp.asarray(x) for name, x in arrays.items()}
    start = time.perf_counter()
    result = jax.block_until_ready(compiled(operands))
    first = time.perf_counter() - start

    def run() -> None:
        for _ in range(REPEATS):
            jax.block_until_ready(compiled(operands))

    start = time.perf_counter()
    run()
    wall = (time.perf_counter() - start) / REPEATS
    busy, _ = busy_seconds(run)
    equals_cpu = None
    if spec.seq_len_q <= FEW_TOKENS:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            again = jax.jit(make)({name: jnp.asarray(x) for name, x in arrays.items()})
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(again), strict=True)
        equals_cpu = all(np.array_equal(x, y) for x, y in pairs)
    return {
        "first_call_s": round(first, 3),
        "wall_us": round(1e6 * wall, 1),
        "busy_us": None if busy is None else round(1e6 * busy / REPEATS, 1),
        "equals_cpu": equals_cpu,
    }


def main() -> None:
    print(f"{jax.local_devices()[0].device_kind}, JAX {jax.__version__}")
    report: dict[str, Any] = {"environment": environment(), "masks": {}}
    for name, (spec, arrays) in calls().items():
        row: dict[str, Any] = {"refused": [str(x) for x in not_supported_reasons(spec, TILES)]}
        if not row["refused"]:
            row["lists_bytes"] = lists_bytes(spec, TILES)
            row["forward"] = measured(spec, arrays, has_backward=False)
            row["both"] = measured(spec, arrays, has_backward=True)
        report["masks"][name] = row
        print(name, json.dumps(row), flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
