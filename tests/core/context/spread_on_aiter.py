"""Calls spread over four CPU devices, with AITER's handlers and its emulator; prints JSON.

Errors are those against XLA in float32 on one device. This is a separate process, because the
number of devices is fixed when a process starts.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from attn_dispatch import dot_product_attention, fallback, target
from attn_dispatch.core import primitive
from attn_dispatch.devices.target import device_for
from tests.core.context.spread_cases import CAUSAL, IDS, LSE, PACKED, jit, manual, window
from tests.support import aiter_emulated, spread_calls
from tests.support.spread_calls import Case, measured

FOUR, DATA, PAIR = {"context": 4}, {"data": 2, "context": 2}, {"context": 2}

CASES = {
    "ring, zigzag, GQA": Case(
        manual(FOUR, "ring", "zigzag"), batch=2, rows=8, heads=4, kv_heads=2, dim=16, dim_v=16,
        further=("sinks",), options=CAUSAL | LSE,
    ),
    "ring, packed": Case(
        jit(DATA, "ring"), batch=2, rows=8, heads=4, kv_heads=2, dim=16, dim_v=16, further=IDS,
        options=PACKED,
    ),
    "ring, documents": Case(
        manual(DATA, "ring", "documents"), batch=2, rows=9, heads=4, kv_heads=2, dim=16, dim_v=8,
        further=IDS, options=PACKED | LSE,
    ),
    "gather, bias": Case(
        jit(DATA, "gather"), batch=2, rows=8, heads=4, kv_heads=2, dim=16, dim_v=16,
        further=("bias",), options=CAUSAL | LSE,
    ),
    "halo": Case(
        manual(FOUR, "halo"), batch=2, rows=8, heads=4, kv_heads=2, dim=16, dim_v=16,
        options=window(5) | LSE,
    ),
    "halo, packed": Case(
        jit(FOUR, "halo"), batch=1, rows=8, heads=4, kv_heads=2, dim=16, dim_v=16, further=IDS,
        options=window(5) | PACKED,
    ),
    "heads": Case(
        manual(FOUR, "heads", "zigzag"), batch=1, rows=8, heads=8, kv_heads=4, dim=16, dim_v=16,
        further=("sinks",), options=CAUSAL | LSE,
    ),
    "keys, one query": Case(
        jit(DATA, "auto"), batch=2, queries=1, keys=80, heads=4, kv_heads=2, dim=16, dim_v=16,
        further=("key_value_seq_lengths",),
        options=CAUSAL | {"causal_alignment": "bottom_right"},
    ),
    "ring, ASM": Case(
        manual(PAIR, "ring", "zigzag"), batch=1, rows=264, heads=2, kv_heads=1, dim=128,
        dim_v=128, options=CAUSAL,
    ),
}  # fmt: skip
ARCHS = {x: ("gfx942", "gfx950") if "ASM" in x else ("gfx942",) for x in CASES}
"""The architectures differ only in their ASM kernels, which begin at 129 queries."""

KINDS = ("forward", "backward", "split_kv")


def attention(*, query: Any, key: Any, value: Any, **rest: Any) -> Any:
    """The call in bfloat16 on AITER where there is a mesh, else the same numbers on XLA."""
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    given = {"query": query, "key": key, "value": value, "bias": rest.pop("bias", None)}
    given = {x: y.astype(jnp.bfloat16) for x, y in given.items() if y is not None}
    if not on_mesh:
        given = {x: y.astype(jnp.float32) for x, y in given.items()}
    found = dot_product_attention(**given, **rest, implementation="aiter" if on_mesh else "xla")
    return jax.tree.map(lambda x: x.astype(jnp.float32), found)


def facts(case: Case, arch: str) -> dict[str, Any]:
    """The errors of a case, and the calls that AITER got."""
    with target(arch), aiter_emulated.arch(arch) as emulator:
        try:
            found = measured(case)
        except Exception as error:  # One failure is one test's, not all tests'.
            return {"failed": f"{type(error).__name__}: {error}"[:2000]}
        last = emulator.last_call("backward")
        return {
            "errors": found.errors,
            "strategies": found.strategies,
            "calls": {x: n for x in KINDS if (n := emulator.calls(x))},
            "is_asm": last is not None and bool(last.call.use_asm),
        }


def main() -> None:
    with (
        fallback("error"),
        mock.patch.object(primitive, "device_for", lambda _: device_for("rocm")),
        mock.patch.object(spread_calls, "dot_product_attention", attention),
    ):
        report = {x: {y: facts(CASES[x], y) for y in ARCHS[x]} for x in CASES}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
