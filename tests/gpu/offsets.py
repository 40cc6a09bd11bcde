"""Checks causal_alignment as a number on kernels, and measures what it saves.

usage: python tests/gpu/offsets.py [--out FOLDER] [--implementations cudnn,flash,fa4] [--seconds 90]

Each implementation that is installed runs calls with static and traced offsets before, among and
past the keys, with windows and lengths, in both directions. The reference is XLA in float32, from
the same numbers. Then a chunk of a prompt and a neighbour in a ring are measured, beside the same
calls with causality from the bottom right on keys cut by hand, and with a mask_mod, which is how
they had to be written before. The exit status is 1 if an error exceeds what is allowed, or if a
call that should run on a kernel did not.
"""

from __future__ import annotations

import os

os.environ.setdefault("ATTN_DISPATCH_POISON", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attn_dispatch import dot_product_attention, explain
from tests.gpu import kernel_report

_ALLOWED = 1.5e-2
"""The largest error, as a share of the largest number of a reference, of bfloat16 results."""


@dataclass(frozen=True)
class Call:
    name: str
    t: int
    s: int
    offset: Any
    """An int, or a list of one for each of two batch rows, which are traced."""
    arguments: Mapping[str, Any]


def calls() -> Iterator[Call]:
    causal: dict[str, Any] = {"is_causal": True}
    near = causal | {"local_window_size": (200, None)}
    for t, s, offsets in ((384, 1024, (300, 640, 900, 1100, -200)), (1000, 260, (-800, 77, 250))):
        for offset in offsets:
            yield Call("causal", t, s, offset, causal)
            yield Call("window", t, s, offset, near)
            yield Call("band", t, s, offset, {"local_window_size": (70, 30)})
        for rows in ([offsets[0], offsets[1]], [offsets[2], 10], [s + 5, -t // 2]):
            yield Call("causal", t, s, rows, causal)
            yield Call("window", t, s, rows, near)
            yield Call("band", t, s, rows, {"local_window_size": (70, 30)})
    lengths = {"key_value_seq_lengths": np.array([700, 1024])}
    yield Call("lengths", 384, 1024, [316, 640], causal | lengths)
    yield Call("lengths", 384, 1024, 200, causal | lengths)


def arrays(t: int, s: int, heads: int = 8, kv_heads: int = 2, batch: int = 2) -> list[jax.Array]:
    rng = np.random.default_rng(t + s)
    shapes = ((batch, t, heads), *((batch, s, kv_heads),) * 2)
    return [jnp.asarray(rng.standard_normal((*x, 128)), jnp.bfloat16) for x in shapes]


def results(call: Call, implementation: Any, given: list[jax.Array]) -> dict[str, jax.Array]:
    """out, lse and gradients."""

    def attend(q: Any, k: Any, v: Any, offset: Any) -> Any:
        return dot_product_attention(
            q, k, v, causal_alignment=offset, return_lse=True, implementation=implementation,
            **call.arguments,
        )  # fmt: skip

    def both(q: Any, k: Any, v: Any, offset: Any) -> Any:
        (out, lse), pull = jax.vjp(lambda *x: attend(*x, offset), q, k, v)
        wave = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return out, lse, *pull((wave.astype(out.dtype), jnp.ones_like(lse) / 8))

    names = ("out", "lse", "dq", "dk", "dv")
    if isinstance(call.offset, int):
        found = jax.jit(lambda *x: both(*x, call.offset))(*given)
    else:
        found = jax.jit(both)(*given, jnp.array(call.offset, jnp.int32))
    return dict(zip(names, found, strict=True))


def check(call: Call, implementation: str) -> Iterator[kernel_report.Row]:
    given = arrays(call.t, call.s)
    exact = results(call, "xla", [x.astype(jnp.float32) for x in given])
    case = f"{implementation} {call.name} {call.t}x{call.s} {call.offset}"
    try:
        found = results(call, (implementation,), given)
    except NotImplementedError as refused:
        print(f"refused: {case}: {str(refused)[:300]}", flush=True)
        yield kernel_report.row(case, "runs", 1.0, 0.0)
        return
    for name, x in found.items():
        got = kernel_report.relative_error(x, exact[name], least=0.1)
        if got > _ALLOWED:
            print(f"WRONG: {case}: {name} {got:.3g}", flush=True)
        yield kernel_report.row(case, name, got, _ALLOWED)


def times_of(implementation: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Microseconds forward and backward of each way to write two calls."""
    for name, t, s, offset, left in (
        ("a chunk of 4096 at 12288 of 32768 keys", 4096, 32768, 12288, None),
        ("16384 queries behind a chunk of 16384, window 4096", 16384, 16384, 16384, 4095),
    ):
        q, k, v = arrays(t, s, 32, 8, 1)
        window = None if left is None else (left, None)
        first = 0 if left is None else offset - left
        cut = slice(first, min(t + offset, s))

        def mod(b: Any, n: Any, i: Any, j: Any, offset: int = offset, left: Any = left) -> Any:
            seen = j <= i + offset
            return seen if left is None else seen & (j >= i + offset - left)

        def static(q: Any, k: Any, v: Any, x: Any, o: int = offset, w: Any = window) -> Any:
            return {"is_causal": True, "causal_alignment": o, "local_window_size": w}

        def traced(q: Any, k: Any, v: Any, x: Any, w: Any = window) -> Any:
            return {"is_causal": True, "causal_alignment": x, "local_window_size": w}

        ways: dict[str, Callable[..., dict[str, Any]]] = {"static": static, "traced": traced}
        ways["mask_mod"] = lambda *x, m=mod: {"mask_mod": m}
        if left is None:
            ways["keys cut by hand"] = lambda *x: {
                "is_causal": True, "causal_alignment": "bottom_right"
            }  # fmt: skip
        programs: dict[str, Callable[[], object]] = {}
        for way, options in ways.items():
            by_hand = way == "keys cut by hand"
            given = (q, k[:, cut], v[:, cut]) if by_hand else (q, k, v)

            def loss(q: Any, k: Any, v: Any, x: Any, options: Any = options) -> Any:
                out = dot_product_attention(
                    q, k, v, implementation=(implementation,), **options(q, k, v, x)
                )
                return out.astype(jnp.float32).sum()

            at = jnp.full((1,), offset, jnp.int32)
            programs[way] = partial(jax.jit(jax.grad(loss, (0, 1, 2))), *given, at)
        times = kernel_report.measured(programs)
        print(implementation, name, {x: round(y) for x, y in times.items()}, flush=True)
        yield f"{implementation}: {name}", times


def is_installed(implementation: str) -> bool:
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    found = explain(x, x, x, is_causal=True).forward
    return any(v.implementation == implementation and v.is_eligible for v in found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--implementations", default="cudnn,flash,fa4")
    parser.add_argument("--seconds", type=float, default=90)
    arguments = parser.parse_args()
    begin = time.monotonic()
    names = [x for x in arguments.implementations.split(",") if is_installed(x)]
    print("implementations:", names, flush=True)
    rows: list[kernel_report.Row] = []
    times: dict[str, dict[str, float]] = {}
    found = list(calls())
    every = [*found[::3], *found[1::3], *found[2::3]]  # all kinds early, if time is short
    for number, call in enumerate(every):
        if time.monotonic() - begin > arguments.seconds:
            print(f"no time for the last {len(every) - number} of {len(every)} calls", flush=True)
            break
        for name in names:
            rows += check(call, name)
    for name in names:
        times |= dict(times_of(name))
    wrong = [row for row in rows if not row["right"]]
    print(f"{len(rows)} checks, {len(wrong)} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    if arguments.out is not None:
        kernel_report.write(arguments.out, "offsets", ", ".join(names), rows, times)
    sys.exit(bool(wrong) or not rows)


if __name__ == "__main__":
    main()
