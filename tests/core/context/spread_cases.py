"""Calls spread over eight CPU devices: errors, collectives and bytes kept; prints JSON.

This is a separate process, because the number of devices is fixed when a process starts.

usage: python -m tests.core.context.spread_cases [NAME ...]
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

if __name__ == "__main__":  # tests import constants from here, in a process with one device
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    )

import numpy as np

from attn_dispatch import AttentionShardingWarning
from tests.support.spread_calls import Case, Spread, measured

IDS, BOTH_IDS = ("query_segment_ids",), ("query_segment_ids", "key_value_segment_ids")
CAUSAL: dict[str, Any] = {"is_causal": True}
LSE: dict[str, Any] = {"return_lse": True}
PACKED: dict[str, Any] = {"is_causal": True, "max_segments": 5}

DROPOUT = {"dropout_rate": 0.3, "dropout_key": np.array([1, 2], np.uint32)}

ALONE = {"context": 8}
TWO = {"context_a": 2, "context_b": 4}
DATA = {"data": 2, "context": 4}
PAIR = {"data": 4, "context": 2}
TENSOR = {"context": 4, "tensor": 2}
ALL = {"data": 2, "context": 2, "tensor": 2}
FSDP = {"data_a": 2, "data_b": 2, "context": 2}


def window(left: int) -> dict[str, Any]:
    return {"is_causal": True, "local_window_size": (left, 0)}


def later(b: Any, n: Any, t: Any, s: Any) -> Any:
    """A mask_mod."""
    return t + n >= s


def jit(mesh: dict[str, int], strategy: str, kind: str = "Auto") -> Spread:
    return Spread(mesh, kind, (), strategy)


def manual(
    mesh: dict[str, int],
    strategy: str,
    order: Any = "contiguous",
    *,
    check_vma: bool = True,
    axes: tuple[str, ...] = (),
    kind: str = "Auto",
) -> Spread:
    return Spread(mesh, kind, axes or tuple(mesh), strategy, order, check_vma)


CASES = {
    "ring, GQA, lse, sinks": Case(
        manual(DATA, "ring", "zigzag"), batch=2, heads=6, kv_heads=3, further=("sinks",),
        options=CAUSAL | LSE,
    ),
    "ring, packed, no batch": Case(
        jit(TENSOR, "ring", "Explicit"), heads=4, kv_heads=2, further=("sinks", *IDS),
        options=PACKED | {"return_max_logits": True}, dim_v=8,
    ),
    "ring, full, more keys": Case(
        jit(ALONE, "ring"), batch=1, rows=3, keys=6, heads=3, kv_heads=3,
        options=LSE | {"logits_soft_cap": 3.0, "scale": 0.7},
    ),
    "ring, layers": Case(jit(DATA, "ring"), batch=2, options=CAUSAL, program="layers"),
    "ring, layers, gradients inside": Case(
        manual(ALL, "ring", "zigzag"), batch=2, heads=4, kv_heads=2, further=("sinks", *IDS),
        options=PACKED, program="layers", derivative="inside",
    ),
    "ring, vmap": Case(
        manual(ALONE, "ring", check_vma=False), front=2, further=IDS,
        options=PACKED | LSE, program="vmap",
    ),
    "ring, heads first": Case(
        manual(DATA, "ring", "zigzag", check_vma=False), batch=2, heads=2, kv_heads=2,
        options=CAUSAL | LSE | {"qkv_layout": "BNTH"},
    ),
    "ring, jvp": Case(jit(DATA, "ring"), batch=2, options=CAUSAL | LSE, derivative="jvp"),
    "ring in a group of Auto axes": Case(
        manual(ALL, "ring", axes=("context",)), batch=2, heads=4, kv_heads=2, options=CAUSAL,
    ),
    "ring, documents, GQA": Case(
        manual(DATA, "ring", "documents"), batch=4, rows=9, heads=6, kv_heads=3, dim_v=8,
        further=("sinks", *IDS), options=PACKED | LSE | {"return_max_logits": True},
    ),
    "ring, documents, two axes": Case(
        manual(TWO, "auto", "documents"), batch=2, rows=8, heads=8, kv_heads=8,
        further=("sinks", *IDS), options=CAUSAL | LSE | {"logits_soft_cap": 3.0},
    ),
    "ring, documents, layers": Case(
        manual(ALL, "halo", "documents"), batch=2, rows=10, heads=4, kv_heads=2, further=IDS,
        options=PACKED, program="layers", derivative="inside",
    ),
    "ring, documents, vmap": Case(
        manual(ALONE, "gather", "documents", check_vma=False), front=2, batch=1, rows=6,
        heads=8, kv_heads=8, further=IDS,
        options=PACKED | LSE | {"qkv_layout": "BNTH"}, program="vmap",
    ),
    "ring, documents, full": Case(
        manual(PAIR, "ring", "documents"), batch=4, rows=7, further=IDS, options=LSE,
    ),
    "ring, documents in a group": Case(
        manual(ALL, "ring", "documents", axes=("context",), kind="Explicit"), batch=4, rows=8,
        heads=4, kv_heads=2, further=IDS, options=PACKED,
    ),
    "gather, bias, ALiBi": Case(
        jit(ALL, "gather", "Explicit"), batch=2, heads=4, kv_heads=2, shared=("b",),
        further=("bias", "alibi_slopes"), options=CAUSAL | LSE,
    ),
    "gather, bias and mask of one row": Case(
        manual(TWO, "gather", "zigzag"), batch=1, further=("bias", "mask"), shared=("n", "t"),
        options=CAUSAL,
    ),
    "gather, mask of one row": Case(
        jit(DATA, "gather"), batch=2, further=("mask", "sinks"), shared=("t",), options=LSE,
    ),
    "gather, one row a device": Case(
        manual(DATA, "gather"), batch=2, rows=1, further=("bias",), options=CAUSAL,
    ),
    "gather, packed": Case(
        manual(DATA, "gather", "zigzag", check_vma=False), batch=2, further=("mask", *IDS),
        shared=("b", "n"), options=window(5) | {"return_max_logits": True},
    ),
    "gather, ids of keys": Case(
        jit(TENSOR, "gather", "Explicit"), batch=1, keys=8, heads=4, further=BOTH_IDS, options=LSE,
    ),
    "gather, lengths": Case(
        jit(DATA, "auto", "Explicit"), batch=2, heads=3, kv_heads=1, rows=3, keys=8,
        further=("sinks", "query_seq_lengths", "key_value_seq_lengths"), options=LSE,
    ),
    "gather, lengths, zigzag": Case(
        manual(ALONE, "gather", "zigzag"), batch=2, heads=3, kv_heads=3,
        further=("key_value_seq_lengths", "bias"), shared=("b",), options=LSE,
    ),
    "ring in a group of Explicit axes": Case(
        manual(TENSOR, "ring", axes=("context",), kind="Explicit"), batch=1, heads=4,
        kv_heads=2, options=CAUSAL,
    ),
    "halo": Case(
        manual(DATA, "halo", check_vma=False), batch=2, heads=6, kv_heads=3, further=("sinks",),
        options=window(3) | LSE,
    ),
    "halo, a part of a device's keys": Case(
        manual(PAIR, "halo"), batch=4, rows=160, heads=1, kv_heads=1, options=window(3),
    ),
    "halo, packed": Case(
        jit(ALONE, "halo", "Explicit"), further=IDS, options=window(4) | PACKED | LSE,
    ),
    "halo, layers": Case(
        jit(DATA, "halo"), batch=2, further=("alibi_slopes",), options=window(2), program="layers",
    ),
    "heads": Case(
        manual(TENSOR, "heads", "zigzag"), batch=1, heads=8, kv_heads=4, further=("mask", "sinks"),
        options=CAUSAL | LSE,
    ),
    "heads, kv heads that do not divide": Case(
        manual(ALONE, "heads", "zigzag"), batch=1, rows=2, heads=24, kv_heads=3, options=CAUSAL,
    ),
    "heads, offset, lengths": Case(
        manual(ALONE, "heads"), batch=1, rows=2, heads=8, kv_heads=8,
        further=("query_seq_lengths",),
        options=CAUSAL | {"causal_alignment": 2, "key_value_seq_lengths": np.array([11], np.int32)},
    ),
    "heads, mask_mod, dropout": Case(
        jit(DATA, "ring"), batch=2, heads=4, kv_heads=2,
        options=DROPOUT | {"mask_mod": later},
    ),
    "heads and a ring": Case(
        manual(TWO, "auto", "zigzag"), heads=4, kv_heads=2, further=IDS, options=PACKED | LSE,
    ),
    "heads and batch": Case(
        manual(TWO, "heads", "zigzag"), batch=2, heads=4, kv_heads=2, further=("sinks",),
        options=CAUSAL | LSE,
    ),
    "batch and gathered keys": Case(
        manual(TWO, "auto"), batch=2, heads=1, kv_heads=1, further=("bias",), options=CAUSAL,
    ),
    "keys, one query": Case(
        jit(DATA, "auto"), batch=2, queries=1, keys=8, heads=4, kv_heads=2,
        further=("sinks", "key_value_seq_lengths"),
        options=CAUSAL | LSE | {"causal_alignment": "bottom_right", "return_max_logits": True},
    ),
    "keys, three queries": Case(
        jit(DATA, "auto", "Explicit"), batch=2, queries=3, keys=16, heads=4, kv_heads=2,
        further=("bias",), shared=("b",), options=LSE,
    ),
    "gathered keys, three queries": Case(
        jit(DATA, "auto", "Explicit"), batch=2, queries=3, keys=16,
        options=CAUSAL | {"causal_alignment": "bottom_right"},
    ),
    "auto, FSDP": Case(
        jit(FSDP, "auto"), batch=4, heads=3, kv_heads=1, further=("sinks",), options=CAUSAL | LSE,
    ),
    "rows along an Auto axis": Case(
        manual(DATA, "ring", axes=("data",)), batch=2, heads=4, kv_heads=2, options=CAUSAL,
    ),
}  # fmt: skip


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore", AttentionShardingWarning)
    report = {}
    for name in names or CASES:
        try:
            found = measured(CASES[name])
        except Exception as error:  # One failure is one test's, not all tests'.
            report[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            continue
        report[name] = {
            "errors": found.errors, "strategies": found.strategies,
            "collectives": found.collectives,
        }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
