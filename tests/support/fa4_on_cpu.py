"""FlashAttention-4's compiled kernels on a CPU: whole programs run a copy of them.

Programs lowered for the CPU get what an H200 would get, in float32.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import jax.numpy as jnp
import pytest

from attn_dispatch import target
from attn_dispatch.core import primitive, select
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.target import parse
from attn_dispatch.fa4 import compiled, interval_calls, rules
from attn_dispatch.fa4.compiled import CompiledLibrary, KernelSet
from attn_dispatch.settings import Block
from tests.support import interval_kernels_in_numpy as in_numpy

SM90 = parse("sm90")

LIBRARY = CompiledLibrary(
    ModuleType("_cuda"),
    path="/kernels.so",
    versions="fa4-jax 0.1.0",
    sets=tuple(
        KernelSet(
            f"64_64_{dtype}", "sm90", dtype, 64, 64,
            forward_tile_m=4, forward_tile_n=3, backward_tile_m=2, backward_tile_n=5,
            backward_subtiles=2, differentiates_grouped_heads=True, takes_sinks=True,
        )
        for dtype in ("bfloat16", "float32")
    ),
)  # fmt: skip
"""Kernels of small tiles, of which a small call has several."""


def install(patch: pytest.MonkeyPatch, kernels: ModuleType = in_numpy) -> None:
    """Let every program run these kernels, in blocks of `for_h200`."""

    def forward(query, key, value, rows, lists, scale, arch, change, sinks):
        tile = interval_calls.forward_set(query, value, arch).forward_tiles
        return kernels.forward(tile, query, key, value, rows, lists, scale, sinks)

    def backward(query, key, value, out, lse, out_grad, lse_grad, rows, lists, scale, arch, change):
        tile = interval_calls.backward_set(query, value, arch).backward_tiles
        lse_grad = jnp.zeros_like(lse) if lse_grad is None else lse_grad
        operands = (query, key, value, out, lse, out_grad, lse_grad)
        return kernels.backward(tile, operands, rows, lists, scale)

    patch.setattr(compiled, "find", lambda: LIBRARY)
    select.is_installed.cache_clear()
    patch.setattr(clear_rows, "_native", lambda: None)
    patch.setattr(interval_calls, "forward", forward)
    patch.setattr(interval_calls, "backward", backward)
    patch.setattr(rules, "DTYPE", replace(rules.DTYPE, applies=lambda spec: False))
    patch.setattr(primitive, "device_for", lambda platform: SM90)


def for_h200() -> Block:
    return target("sm90")
