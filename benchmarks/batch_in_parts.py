"""Time and memory of a call with a learned bias, computed whole and in parts.

usage: python benchmarks/batch_in_parts.py [--rounds N] [--seconds S] [--out FOLDER]

cuDNN computes the gradients of bfloat16 queries, keys and values, 32 heads of 64, and of a bias
[1, 32, T, T]: as one call, in several numbers of parts of the heads and of the batch, and in the
parts that the default limit on scratch memory requires. The gradient of the bias is compared with a
float32 computation of some heads. The largest call runs only with the default limit: as one call it
would need 137 GB of scratch memory.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from command import arguments, save
from timing import by_turns, median_ratio

from attn_dispatch import dot_product_attention, explain, scratch_limit
from attn_dispatch.core import scratch
from attn_dispatch.core.rewrites import Rewrite
from attn_dispatch.core.rewrites.in_parts import in_parts_of
from attn_dispatch_tools.reports.environment import environment

HEADS, HEAD_DIM = 32, 64
ONE, DEFAULT = "as one", "default"
_COMPARED_HEADS = 2
"""The number of heads for which the gradient of the bias is compared."""


@dataclass(frozen=True)
class Cell:
    batch: int
    length: int
    bias_dtype: str = "bfloat16"
    is_default_alone: bool = False

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}, {self.bias_dtype} bias"

    def arrays(self) -> list[jax.Array]:
        """out_grad, query, key, value and the bias."""
        shape = (self.batch, self.length, HEADS, HEAD_DIM)
        bias = (1, HEADS, self.length, self.length)
        keys = jax.random.split(jax.random.key(0), 5)
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        arrays = [draw(key, shape, jnp.dtype("bfloat16")) for key in keys[:4]]
        return [*arrays, draw(keys[4], bias, jnp.dtype(self.bias_dtype))]

    def parts(self) -> dict[str, tuple[Rewrite, ...]]:
        """The divisions into parts to measure, by name."""
        if self.is_default_alone:
            return {}
        heads = {f"heads by {x}": (in_parts_of("heads", x),) for x in (1, 2, 4, 8)}
        rows = (self.batch // x for x in (4, 8, 16))
        return heads | {f"batch by {x}": (in_parts_of("batch", x),) for x in rows if x}


CELLS = (
    Cell(64, 2048),
    Cell(64, 2048, "float32"),
    Cell(8, 2048),
    Cell(32, 1024),
    Cell(128, 4096, "float32", is_default_alone=True),
)


def gradients(out_grad: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    def call(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, v, bias=bias, implementation="cudnn")

    return jax.vjp(call, *arrays)[1](out_grad)


@contextmanager
def backward_in(steps: tuple[Rewrite, ...]) -> Generator[None, None, None]:
    """Within this context, backward passes are lowered in these parts, whatever the limit."""
    original = scratch.parts_within
    scratch.parts_within = lambda spec, *_: steps if spec.is_backward else ()
    try:
        yield
    finally:
        scratch.parts_within = original


def compiled(arrays: list[jax.Array], name: str, steps: tuple[Rewrite, ...]) -> Any:
    step = jax.jit(lambda *x: gradients(*x))
    if name == DEFAULT:
        return step.lower(*arrays).compile()
    if name == ONE:
        with scratch_limit("off"):
            return step.lower(*arrays).compile()
    with backward_in(steps):
        return step.lower(*arrays).compile()


@jax.jit
def exact(head: jax.Array, arrays: list[jax.Array]) -> jax.Array:
    """The gradient of the bias of one head, in float32."""
    out_grad, q, k, v, bias = arrays

    def with_row(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        do, qr, kr, vr = (x[row, :, head].astype(jnp.float32) for x in (out_grad, q, k, v))
        with jax.default_matmul_precision("float32"):
            scores = HEAD_DIM**-0.5 * qr @ kr.T + bias[0, head].astype(jnp.float32)
            p, dp = jax.nn.softmax(scores), do @ vr.T
        return total + p * (dp - (p * dp).sum(-1, keepdims=True)), None

    zeros = jnp.zeros(bias.shape[2:], jnp.float32)
    return jax.lax.scan(with_row, zeros, jnp.arange(q.shape[0]))[0]


def bias_error(arrays: list[jax.Array], found: jax.Array) -> float:
    """The largest error of the bias' gradient in some heads, as a share of its largest entry."""
    errors = []
    for head in range(0, HEADS, HEADS // _COMPARED_HEADS):
        expected = exact(jnp.int32(head), arrays)
        worst = jnp.abs(found[0, head].astype(jnp.float32) - expected).max()
        errors.append(float(worst / jnp.abs(expected).max()))
    return max(errors)


def measure(cell: Cell, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each division into parts."""
    arrays = cell.arrays()
    parts = {DEFAULT: (), **({} if cell.is_default_alone else {ONE: ()}), **cell.parts()}
    rows, programs = {}, {}
    for name, steps in parts.items():
        row: dict[str, Any] = {"call": str(cell), "parts": name}
        rows[name] = row
        try:
            program = compiled(arrays, name, steps)
            row["temporary_bytes"] = program.memory_analysis().temp_size_in_bytes
            found = program(*arrays)
            row["bias_error"] = bias_error(arrays, found[3])
            del found
            print(f"  {name}: {row['temporary_bytes'] / 1e9:.2f} GB", file=sys.stderr, flush=True)
        except Exception as error:  # for example out of memory, which concerns only this row
            row["failed"] = str(error).splitlines()[0][:200]
            continue
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        row["peak_bytes_so_far"] = peak
        programs[name] = (program, arrays)
    times = by_turns(programs, rounds, seconds)
    for name, found in times.items():
        rows[name]["ms"] = 1e3 * statistics.median(found)
        if ONE in times:
            rows[name]["over_one"] = median_ratio(times, name, ONE)
    return list(rows.values())


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"| {row['call']} | {row['parts']} | failed: {row['failed']} | | | |"
    ratio = f"{row['over_one']:.3f}" if "over_one" in row else ""
    return (
        f"| {row['call']} | {row['parts']} | {row['temporary_bytes'] / 1e9:.2f} "
        f"| {row.get('ms', 0):.2f} | {ratio} | {row['bias_error']:.1e} |"
    )


def main() -> None:
    args = arguments("Time and memory of calls in parts.", rounds=4, seconds=0.3)
    facts = environment()
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}")
    found = []
    print("| call | parts of the backward pass | temporary GB | ms | time / as one | error |")
    print("|---|---|---|---|---|---|")
    for cell in CELLS:
        q = jax.ShapeDtypeStruct((cell.batch, cell.length, HEADS, HEAD_DIM), jnp.bfloat16)
        bias = (1, HEADS, cell.length, cell.length)
        limit = explain(q, q, q, bias=jax.ShapeDtypeStruct(bias, jnp.dtype(cell.bias_dtype)))
        chosen = next((x for x in limit.backward if x.is_eligible), None)
        rows = measure(cell, args.rounds, args.seconds)
        for row in rows:
            print(line(row), flush=True)
        if chosen is not None:
            print(f"\ndefault: {', '.join(chosen.rewrites) or 'as one'}; {chosen.limit}\n")
        found += rows
    save("batch_in_parts", {"environment": facts, "calls": found}, args.out)


if __name__ == "__main__":
    main()
