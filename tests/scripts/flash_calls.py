"""Comparison of FlashAttention's custom calls: ours, and those of the package dew-flash-attn.

usage: python -m tests.scripts.flash_calls

The script needs the package. It compares the lines of the lowered modules and writes half of them
to tests/flash/custom_calls.json, with which tests/flash/test_custom_calls.py checks ours without
the package. The package's libraries are not loaded: its Python alone makes the calls.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.flash import kernels
from attn_dispatch.flash.call import FlashCall, offsets_count
from attn_dispatch.flash.generations import ALL, generation_of
from tests.support.repository import TESTS

KEPT = TESTS / "flash" / "custom_calls.json"
MULTIPROCESSORS = {"sm80": 108, "sm89": 142, "sm90": 132, "sm120": 170}
_DRAWS, _KEPT, _SEED = 60, 30, 20261124
"""The draws of each arch, and how many of them are in the kept file."""

Facts = dict[str, Any]


def drawn() -> Iterator[Facts]:
    """Drawn calls in the kernels' terms, with some of every kind for each arch."""
    rng = np.random.default_rng(_SEED)
    for arch in MULTIPROCESSORS:
        for index in range(_DRAWS):
            rows_q, rows_kv = (int(rng.choice([1, 7, 64, 129, 500, 2048])) for _ in range(2))
            kv_heads = int(rng.choice([1, 2, 3, 8]))
            window = (-1, -1) if index % 4 < 2 else tuple(map(int, rng.integers(-1, 300, 2)))
            is_packed, backward = bool(index % 2), bool(index // 2 % 2)
            widest = generation_of(arch).widest_on(arch, is_backward=backward)
            yield {
                "arch": arch,
                "backward": backward,
                "is_packed": is_packed,
                "dtype": str(rng.choice(["float16", "bfloat16"])),
                "batch": 1 if is_packed else int(rng.choice([1, 2, 5])),
                "sequences": int(rng.choice([1, 3, 16])) if is_packed else 0,
                "rows_q": rows_q,
                "rows_kv": rows_kv,
                "longest_q": int(rng.integers(1, rows_q + 1)),
                "longest_kv": int(rng.integers(1, rows_kv + 1)),
                "num_heads": kv_heads * int(rng.choice([1, 2, 4])),
                "num_kv_heads": kv_heads,
                "head_dim": 8 * int(rng.integers(1, widest // 8 + 1)),
                "is_causal": bool(rng.integers(2)) and window == (-1, -1),
                "window": window,
                "scale": round(float(rng.uniform(0.01, 2)), 3),
            }


def call_of(facts: Facts) -> FlashCall:
    shared = {x: y for x, y in facts.items() if x not in ("arch", "window", "scale")}
    left, right = facts["window"]
    # Our calls say causal by a right window of 0; the package passes its arguments on unchanged.
    return FlashCall(
        **shared,
        gap=0,
        window_left=left,
        window_right=right,
        generation=generation_of(facts["arch"]),
        multiprocessors=MULTIPROCESSORS[facts["arch"]],
    )


def operands_of(call: FlashCall) -> tuple[list[jax.ShapeDtypeStruct], ...]:
    """([out_grad,] query, key, value [, out, lse]) in the layout of passes.py, and the offsets."""
    leading = [(rows,) if call.is_packed else (call.batch, rows)
               for rows in (call.rows_q, call.rows_kv)]  # fmt: skip
    heads = (call.num_heads, call.num_kv_heads)
    q, k = (
        jax.ShapeDtypeStruct((*x, n, call.head_dim), call.dtype)
        for x, n in zip(leading, heads, strict=True)
    )
    lse = (call.num_heads, call.rows_q)
    lse = jax.ShapeDtypeStruct(lse if call.is_packed else (call.batch, *lse), jnp.float32)
    offsets = [jax.ShapeDtypeStruct((offsets_count(call),), jnp.int32)] * (2 * call.is_packed)
    return ([q, q, k, k, q, lse] if call.backward else [q, k, k]), offsets


def ours(facts: Facts) -> str:
    call = call_of(facts)
    arrays, offsets = operands_of(call)
    run = kernels.backward if call.backward else kernels.forward

    def both(arrays, offsets):
        return run(call, arrays, tuple(offsets), facts["scale"])

    names = {x.name: x.symbol for generation in ALL for x in generation.targets}
    target = call.generation.target(is_backward=call.backward, is_packed=call.is_packed)
    return _line(both, arrays, offsets).replace(target.name, names[target.name])


def theirs(package: ModuleType, facts: Facts) -> str:
    call = call_of(facts)
    arrays, offsets = operands_of(call)
    is_fa3 = "90" in facts["arch"]
    if call.backward and call.is_packed and not is_fa3:
        by_sequence = (offsets_count(call) - 1, call.num_heads, call.longest_q)
        arrays[5] = jax.ShapeDtypeStruct(by_sequence, jnp.float32)
    run = package._backward if call.backward else package._forward
    longest = (call.longest_q, call.longest_kv) if call.is_packed else None
    options = (facts["scale"], facts["is_causal"], tuple(facts["window"]))

    def both(arrays, offsets):
        return run(*arrays, tuple(offsets) or None, longest, *options)

    with (
        mock.patch.object(package, "_hopper", lambda: is_fa3),
        mock.patch.object(package, "_multiprocessors", lambda: call.multiprocessors),
        mock.patch.object(package, "_registered", lambda: None),
    ):
        return _line(both, arrays, offsets)


def imported() -> ModuleType | None:
    """The package without its libraries; None if it is not installed."""
    try:
        with mock.patch.object(ctypes.cdll, "LoadLibrary", lambda path: _Library()):
            import dew_flash_attn
    except ImportError:
        return None
    return dew_flash_attn


class _Library:
    """A stand-in for a library that reports its GPUs."""

    def __getattr__(self, name: str) -> Any:
        def report() -> bytes:
            return b"90a-real" if "flash3" in name else b"80-real,120-real"

        return report


def _line(run: Any, arrays: list[Any], offsets: list[Any]) -> str:
    """The custom call of a function lowered for CUDA: its target, attributes, orders and types."""
    traced = jax.jit(run).trace(arrays, offsets)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (x for x in text.splitlines() if "custom_call @" in x and "flash" in x)
    line = re.sub(r"%[\w#:]+(, )?", "", line).split("custom_call ")[1].strip()
    # The kept file names an array's order of axes alone: [2, 1, 0].
    line = re.sub(r"dense<(\[[\d, ]+\]|\d)> : tensor<\dxindex>", r"\1", line)
    return without_row_major_layouts(line)


def without_row_major_layouts(line: str) -> str:
    """The custom call without the layouts of its operands, or results, if all are row-major."""

    def kept(layouts: re.Match[str]) -> str:
        orders = [
            [*map(int, re.findall(r"\d", x))] for x in re.findall(r"\[[\d, ]+\]|\d", layouts[1])
        ]
        return "" if all(x == [*range(len(x))][::-1] for x in orders) else layouts[0]

    return re.sub(
        r"(?:, )?(?:operand|result)_layouts = \[((?:(?:\[[\d, ]+\]|\d)(?:, )?)*)\]", kept, line
    )


def main() -> None:
    package = imported()
    if package is None:
        sys.exit("flash_calls.py needs dew-flash-attn: pip install --no-deps dew-flash-attn-cu13")
    rows, drawn_calls = [], list(drawn())
    for number, facts in enumerate(drawn_calls):
        expected = theirs(package, facts)
        assert ours(facts) == expected, f"{facts}\n{ours(facts)}\n{expected}"
        if number % _DRAWS < _KEPT:
            rows.append(facts | {"custom_call": expected})
    text = ",\n".join(json.dumps(x, separators=(",", ":")) for x in rows)
    KEPT.write_text(f"[\n{text}\n]\n")
    print(f"{len(drawn_calls)} custom calls are those of dew-flash-attn, jax {jax.__version__}")


if __name__ == "__main__":
    main()
