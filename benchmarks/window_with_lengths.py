"""Speed of a window with lengths, aligned to the bottom right, and of other forms of the same call.

usage: python benchmarks/window_with_lengths.py [--rounds N] [--seconds S] [--out FOLDER]
       [--cells long,short,batch,few] [--implementations cudnn,flash]
       python benchmarks/window_with_lengths.py --check

One GPU; bfloat16, 32 query and 8 key/value heads of 128, a window of (4095, 0), forward alone and
forward with backward. The forms that take `key_value_seq_lengths` compute the same numbers, which
is checked before they are timed; the others are there for comparison. `--check` compares all forms
at small sizes on any device, and times nothing.

lengths         key_value_seq_lengths, causal_alignment="bottom_right"
both_lengths    lengths with query_seq_lengths as well, all of which are full
padding_mask    lengths, for which cuDNN prefers its padding mask to packed arrays
cu_seqlens      the ragged call: the real rows of each batch row, then a sequence without queries
aligned         queries moved to the rows of the keys at their diagonal, and one length for both
segments        aligned, with segment ids in place of lengths
halo_C          blocks of C queries as batch rows, each with the keys in its window

no_lengths      the same window without lengths: T queries, S keys, bottom right
no_lengths_aligned  no_lengths, with queries moved as in aligned
square          S queries and S keys without lengths: twice the queries if S is 2 · T
square_top      T queries and T keys, lengths of both, top left
square_bottom   T queries and T keys, key_value_seq_lengths, bottom right
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from command import save

import attn_dispatch
import attn_dispatch.cudnn as cudnn
from attn_dispatch.core.tuning.timing import seconds_per_call, turns
from attn_dispatch_tools.reports.environment import environment

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BLOCKS = (2048, 4096, 8192)


@dataclass(frozen=True)
class Cell:
    """T queries and S keys; each batch row has a key length, and the queries are at its end."""

    queries: int
    keys: int
    left: int
    lengths: tuple[int, ...]
    blocks: tuple[int, ...] = BLOCKS
    heads: tuple[int, int] = (HEADS, KV_HEADS)
    head_dim: int = HEAD_DIM


CELLS = {
    "long": Cell(65536, 131072, 4095, (130071,)),
    "short": Cell(16384, 32768, 4095, (31767,)),
    "batch": Cell(8192, 16384, 1023, (15999, 9001, 16384, 5000), (1024, 2048, 4096)),
    "few": Cell(2048, 131072, 4095, (130071,), (2048,)),
}
CHECKED = (
    Cell(64, 128, 15, (128, 100, 65, 64, 79, 80, 63, 20, 1, 0), (16, 32), (4, 2), 16),
    Cell(128, 96, 31, (96, 95, 50, 1, 0), (32, 64), (4, 2), 16),
)

Form = Callable[..., jax.Array]


def attend(q, k, v, options: dict[str, Any], **more: Any) -> jax.Array:
    return attn_dispatch.dot_product_attention(q, k, v, **options, **more)


def lengths(q, k, v, n, cell: Cell, options: dict[str, Any]) -> jax.Array:
    return attend(
        q, k, v, options, key_value_seq_lengths=n, causal_alignment="bottom_right",
        local_window_size=(cell.left, 0),
    )  # fmt: skip


def both_lengths(q, k, v, n, cell: Cell, options: dict[str, Any]) -> jax.Array:
    full = jnp.full(n.shape, q.shape[1], jnp.int32)
    return lengths(q, k, v, n, cell, {**options, "query_seq_lengths": full})


def cu_seqlens(q, k, v, n, cell: Cell, options: dict[str, Any]) -> jax.Array:
    batch, (t, s) = q.shape[0], (q.shape[1], k.shape[1])
    first = jnp.arange(batch, dtype=jnp.int32)

    def ends(here, whole):
        inner = jnp.stack([first * whole + here, (first + 1) * whole], 1).reshape(-1)
        return jnp.concatenate([jnp.zeros(1, jnp.int32), inner])

    out = attn_dispatch.ragged_dot_product_attention(
        *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)),
        cu_seqlens_q=ends(jnp.full(batch, t, jnp.int32), t), cu_seqlens_kv=ends(n, s),
        max_seqlen_q=t, max_seqlen_kv=s, causal_alignment="bottom_right",
        local_window_size=(cell.left, 0), **options,
    )  # fmt: skip
    return out.reshape(*q.shape[:3], v.shape[-1])


def _row_slices(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """`size` rows of x [B, L, ...] from start [B] on, which is -size to L; rows outside x are 0."""
    padded = jnp.pad(x, [(0, 0), (size, size), *[(0, 0)] * (x.ndim - 2)])
    # Separate slices, because the transpose of a gather would add row by row.
    rows = [
        jax.lax.dynamic_slice_in_dim(y, i + size, size) for y, i in zip(padded, start, strict=True)
    ]
    return jnp.stack(rows)


def _sizes(cell: Cell, n, t: int) -> tuple[int, Any, Any, Any]:
    """The number of rows, how many of them are real [B], the first key [B], and the first query's
    row [B]."""
    rows = t + cell.left + 1
    first_key = jnp.maximum(n - rows, 0)
    return rows, jnp.minimum(n, rows), first_key, n - t - first_key


def aligned(q, k, v, n, cell: Cell, options: dict[str, Any]) -> jax.Array:
    t = q.shape[1]
    rows, number, first_key, first_query = _sizes(cell, n, t)
    taken_k, taken_v = (_row_slices(x, first_key, rows) for x in (k, v))
    out = attend(
        _row_slices(q, -first_query, rows), taken_k, taken_v, options,
        query_seq_lengths=number, key_value_seq_lengths=number, local_window_size=(cell.left, 0),
    )  # fmt: skip
    return _row_slices(out, first_query, t)


def segments(q, k, v, n, cell: Cell, options: dict[str, Any]) -> jax.Array:
    t = q.shape[1]
    rows, number, first_key, first_query = _sizes(cell, n, t)
    ids = (jnp.arange(rows) < number[:, None]).astype(jnp.int32)
    taken_k, taken_v = (_row_slices(x, first_key, rows) for x in (k, v))
    out = attend(
        _row_slices(q, -first_query, rows), taken_k, taken_v, options,
        query_segment_ids=ids, max_segments=1, local_window_size=(cell.left, 0),
    )  # fmt: skip
    return _row_slices(out, first_query, t)


def halo(q, k, v, n, cell: Cell, options: dict[str, Any], block: int) -> jax.Array:
    batch, t = q.shape[:2]
    reach, count = cell.left + 1, t // block
    first = n - t - reach  # the first key in each row's window; places before key 0 are padding
    is_key = first[:, None] + jnp.arange(reach + t, dtype=jnp.int32) >= 0

    def blocks(x):
        """[B, reach + T, ...] as [B · count, reach + block, ...]."""
        own = x[:, reach:].reshape(batch, count, block, *x.shape[2:])
        if reach <= block:
            before = x[:, :reach][:, None], own[:, :-1, block - reach :]
            parts = [jnp.concatenate(before, axis=1), own]
        else:
            assert reach % block == 0
            parts = [x[:, i * block :][:, :t].reshape(own.shape) for i in range(reach // block)] + [
                own
            ]
        return jnp.concatenate(parts, axis=2).reshape(batch * count, -1, *x.shape[2:])

    taken_k, taken_v = (blocks(_row_slices(x, first, reach + t)) for x in (k, v))
    key_ids = blocks(is_key.astype(jnp.int32))
    # Queries whose diagonal is before key 0 are padding, too.
    query_ids = is_key[:, reach:].astype(jnp.int32).reshape(-1, block)
    out = attend(
        q.reshape(batch * count, block, *q.shape[2:]), taken_k, taken_v, options,
        query_segment_ids=query_ids, key_value_segment_ids=key_ids, max_segments=1,
        causal_alignment="bottom_right", local_window_size=(cell.left, 0),
    )  # fmt: skip
    return out.reshape(batch, t, *out.shape[2:])


def no_lengths(q, k, v, n, cell: Cell, options: dict[str, Any]) -> jax.Array:
    return attend(
        q, k, v, options, causal_alignment="bottom_right", local_window_size=(cell.left, 0)
    )


def no_lengths_aligned(q, k, v, n, cell: Cell, options: dict[str, Any]) -> jax.Array:
    reach, t = cell.left + 1, q.shape[1]
    k, v = (x[:, -(t + reach) :] for x in (k, v))
    q = jnp.pad(q, [(0, 0), (reach, 0), (0, 0), (0, 0)])
    return attend(q, k, v, options, local_window_size=(cell.left, 0))[:, reach:]


def square(q, k, v, n, cell: Cell, options: dict[str, Any]) -> jax.Array:
    return attend(q, k, v, options, local_window_size=(cell.left, 0))


def square_top(q, k, v, n, cell: Cell, options: dict[str, Any]) -> jax.Array:
    n = jnp.minimum(n, q.shape[1])
    return attend(
        q, k, v, options, query_seq_lengths=n, key_value_seq_lengths=n,
        local_window_size=(cell.left, 0),
    )  # fmt: skip


def square_bottom(q, k, v, n, cell: Cell, options: dict[str, Any]) -> jax.Array:
    return lengths(q, k, v, jnp.minimum(n, q.shape[1]), cell, options)


def equal_forms(cell: Cell) -> dict[str, Form]:
    """The forms that compute what `lengths` computes."""
    forms: dict[str, Form] = {
        "lengths": lengths, "both_lengths": both_lengths, "padding_mask": lengths,
        "cu_seqlens": cu_seqlens, "aligned": aligned, "segments": segments,
    }  # fmt: skip
    forms |= {f"halo_{c}": partial(halo, block=c) for c in cell.blocks if cell.queries % c == 0}
    return forms


OTHERS: dict[str, Form] = {
    "no_lengths": no_lengths, "no_lengths_aligned": no_lengths_aligned, "square": square,
    "square_top": square_top, "square_bottom": square_bottom,
}  # fmt: skip


@contextmanager
def padding_mask_first(is_on: bool) -> Iterator[None]:
    """Within this context, cuDNN tries its padding mask before packed arrays."""
    original = cudnn.variants_of
    if is_on:
        cudnn.variants_of = lambda spec: tuple(sorted(original(spec), key=lambda x: x.is_packed))
    try:
        yield
    finally:
        cudnn.variants_of = original


def arrays_of(cell: Cell, name: str = "") -> list[jax.Array]:
    """query, key, value, the gradient of the output, and lengths."""
    t, s = cell.queries, cell.keys
    if name == "square":
        t = s
    elif name.startswith("square_"):
        s = t
    keys = jax.random.split(jax.random.key(0), 4)
    n, k = cell.heads
    made = [
        jax.random.normal(key, (len(cell.lengths), rows, heads, cell.head_dim), jnp.bfloat16)
        for key, rows, heads in zip(keys, (t, s, s, t), (n, k, k, n), strict=True)
    ]
    return [*made, jnp.asarray(cell.lengths, jnp.int32)]


def program(form: Form, cell: Cell, options: dict[str, Any], *, backward: bool):
    def run(q, k, v, out_grad, n):
        call = partial(form, n=n, cell=cell, options=options)
        if not backward:
            return (call(q, k, v),)
        out, pull = jax.vjp(lambda *x: call(*x), q, k, v)
        return out, *pull(out_grad)

    return jax.jit(run)


def compiled(name: str, form: Form, cell: Cell, options: dict[str, Any], *, backward: bool):
    arrays = arrays_of(cell, name)
    with padding_mask_first(name == "padding_mask"):
        return program(form, cell, options, backward=backward).lower(*arrays).compile(), arrays


def differences(found: Any, expected: Any) -> list[float]:
    """The largest difference of each result, as a share of the largest number expected."""
    pairs = zip(found, expected, strict=True)
    return [
        float(
            jnp.max(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)))
            / jnp.maximum(jnp.max(jnp.abs(y.astype(jnp.float32))), 1e-30)
        )
        for x, y in pairs
    ]


def check() -> None:
    """Raise an AssertionError if a form computes other numbers than `lengths`, or NaN."""
    for cell in CHECKED:
        expected = None
        for name, form in equal_forms(cell).items():
            results = program(form, cell, {}, backward=True)(*arrays_of(cell))
            expected = results if expected is None else expected
            found = differences(results, expected)
            print(f"{name:14s}", " ".join(f"{x:.1e}" for x in found))
            assert all(x < 0.02 for x in found), (cell, name, found)


def measure(name: str, cell: Cell, implementation: str, args: argparse.Namespace) -> dict[str, Any]:
    """By form and direction, the time in microseconds, the temporary memory and the differences."""
    options = {"implementation": implementation}
    forms = {**equal_forms(cell), **OTHERS}
    if implementation != "cudnn":
        del forms["padding_mask"]
    rows: dict[str, Any] = {form: {} for form in forms}
    for direction in ("forward", "forward_backward"):
        timed, expected = {}, None
        for form, function in forms.items():
            try:
                run, arrays = compiled(
                    form, function, cell, options, backward=direction != "forward"
                )
                results = run(*arrays)
                jax.block_until_ready(results)
            except Exception as error:
                traceback.print_exc(limit=1)
                rows[form][direction] = {"error": str(error)[:2000]}
                continue
            rows[form][direction] = row = {}
            memory = run.memory_analysis()
            row["temporary_bytes"] = int(memory.temp_size_in_bytes) if memory else None
            if form not in OTHERS:
                expected = results if expected is None else expected
                row["far_from_lengths"] = differences(results, expected)
            del results
            timed[form] = partial(seconds_per_call, run, arrays)
        times = turns(timed, args.rounds, args.seconds, least=2)
        for form, seconds in times.items():
            rows[form][direction]["us"] = 1e6 * statistics.median(seconds)
    show(name, implementation, rows)
    return rows


def show(cell: str, implementation: str, rows: dict[str, Any]) -> None:
    print(f"\n{cell}, {implementation}: us, and temporary GiB with backward", flush=True)
    for form, row in rows.items():
        forward, both = (row.get(x, {}) for x in ("forward", "forward_backward"))
        texts = [f"{x['us']:12.0f}" if "us" in x else f"{'failed':>12s}" for x in (forward, both)]
        memory = both.get("temporary_bytes")
        texts.append(f"{memory / 2**30:8.2f}" if memory else f"{'':8s}")
        texts.append(" ".join(f"{x:.0e}" for x in both.get("far_from_lengths", ())))
        print(f"  {form:18s}", *texts, flush=True)
        if "error" in both:
            print("     ", both["error"].splitlines()[0][:160], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of a window with lengths.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="length of one measurement")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--implementations", default="cudnn,flash")
    parser.add_argument("--check", action="store_true", help="compare at small sizes, time nothing")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON")
    args = parser.parse_args()
    if args.check:
        return check()
    facts = environment()
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}")
    report: dict[str, Any] = {"environment": facts, "cells": {}}
    for name in args.cells.split(","):
        cell = CELLS[name]
        report["cells"][name] = found = {"cell": json.loads(json.dumps(asdict(cell)))}
        for implementation in args.implementations.split(","):
            found[implementation] = measure(name, cell, implementation, args)
            save("window_with_lengths", report, args.out)
    return None


if __name__ == "__main__":
    main()
