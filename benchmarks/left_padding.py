"""Decoding with a left-padded cache: the ways to say which keys are padding.

usage: python benchmarks/left_padding.py [--rounds N] [--seconds S] [--out FOLDER]
       python benchmarks/left_padding.py --check

One GPU; bfloat16, 32 query and 8 key/value heads of 128. The real keys of a batch row are at the
end of its cache; the rows have from an eighth to all of the places, evenly spread. A program makes
16 steps, as those of decode.py do, or as a scan over 16 layers does that share the padding, and all
forms of a cell take turns. Each form is first compared with a float32 computation; `--check` does
only that, at small sizes and on any device.

ids             segment ids: 1 for each query and each real key, 0 for padding
lengths         key_value_seq_lengths, with the keys at the beginning of the cache: what decoding
                costs if the cache is padded on the right
moved           lengths, with the keys of the left-padded cache moved to the beginning in each step
mask            a boolean mask [B, 1, T, S], which frameworks pass
mask_mod        the first real key of each row as an array that a mask_mod reads
jax.nn mask     jax.nn's call on cuDNN, with that mask
jax.nn lengths  jax.nn's call on cuDNN, with lengths; only for a single query
whole           no padding: every place of the cache is a key
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from command import save
from decode import _STEPS as STEPS
from decode import repeated
from timing import median_ratio

from attn_dispatch import dot_product_attention, explain_program
from attn_dispatch.core.tuning.timing import orders, seconds_per_call, turns
from attn_dispatch_tools.bench.device_time import busy_seconds
from attn_dispatch_tools.reports.environment import environment

Call = Callable[..., jax.Array]
BOTTOM_RIGHT: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
WHOLE, BESIDE = "whole", "lengths"
_LARGEST_ERROR = 0.02
"""As a share of the largest number expected; bfloat16 and its probabilities err by less."""


@dataclass(frozen=True)
class Cell:
    batch: int
    keys: int
    queries: int
    heads: tuple[int, int] = (32, 8)
    dim: int = 128

    def __str__(self) -> str:
        asked = "1 query" if self.queries == 1 else f"{self.queries} queries"
        return f"{self.batch} rows of {self.keys} keys, {asked}"

    def lengths(self) -> jax.Array:
        """The number of real keys of each row: from an eighth to all, but at least the queries."""
        spread = jnp.linspace(self.keys / 8, self.keys, self.batch)
        return jnp.maximum(spread.astype(jnp.int32), self.queries)

    def arrays(self) -> list[jax.Array]:
        """query, and the left-padded key and value."""
        seeds = jax.random.split(jax.random.key(0), 3)
        rows, heads = (self.queries, self.keys, self.keys), (self.heads[0], *2 * self.heads[1:])
        return [
            jax.random.normal(seed, (self.batch, n, h, self.dim), jnp.bfloat16)
            for seed, n, h in zip(seeds, rows, heads, strict=True)
        ]


CELLS = (Cell(16, 8192, 1), Cell(64, 4096, 1), Cell(16, 8192, 4), Cell(16, 8192, 512))
CHECKED = (Cell(4, 64, 1, (4, 2), 32), Cell(4, 64, 5, (4, 2), 32))


def ids(q, k, v, n) -> jax.Array:
    ones = jnp.ones(q.shape[:2], jnp.int32)
    return dot_product_attention(
        q, k, v, query_segment_ids=ones, key_value_segment_ids=is_real(k, n).astype(jnp.int32),
        max_segments=1, **BOTTOM_RIGHT,
    )  # fmt: skip


def lengths(q, k, v, n) -> jax.Array:
    return dot_product_attention(q, k, v, key_value_seq_lengths=n, **BOTTOM_RIGHT)


def moved(q, k, v, n) -> jax.Array:
    # XLA would move arrays that are the same in each step once, before the first.
    q, k, v = jax.lax.optimization_barrier((q, k, v))
    return lengths(q, at_the_beginning(k, n), at_the_beginning(v, n), n)


def mask(q, k, v, n) -> jax.Array:
    return dot_product_attention(q, k, v, mask=seen(q, k, n))


def mask_mod(q, k, v, n) -> jax.Array:
    first = k.shape[1] - n
    return dot_product_attention(
        q, k, v, mask_mod=lambda b, n, t, s, first: s >= first[b], mask_mod_args=(first,),
        **BOTTOM_RIGHT,
    )  # fmt: skip


def jax_nn_mask(q, k, v, n) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=seen(q, k, n), implementation="cudnn")


def jax_nn_lengths(q, k, v, n) -> jax.Array:
    return jax.nn.dot_product_attention(
        q, k, v, query_seq_lengths=jnp.ones_like(n), key_value_seq_lengths=n, implementation="cudnn"
    )


def whole(q, k, v, n) -> jax.Array:
    return dot_product_attention(q, k, v, **BOTTOM_RIGHT)


FORMS: dict[str, Call] = {
    "ids": ids, BESIDE: lengths, "moved": moved, "mask": mask, "mask_mod": mask_mod,
    "jax.nn mask": jax_nn_mask, "jax.nn lengths": jax_nn_lengths, WHOLE: whole,
}  # fmt: skip
PADDED_ON_THE_RIGHT = (BESIDE, "jax.nn lengths")


def is_real(k: jax.Array, n: jax.Array) -> jax.Array:
    """bool [B, S]: the last n[b] places of each row."""
    return jnp.arange(k.shape[1]) >= k.shape[1] - n[:, None]


def seen(q: jax.Array, k: jax.Array, n: jax.Array) -> jax.Array:
    """bool [B, 1, T, S]: the real keys that each query sees."""
    t, s = q.shape[1], k.shape[1]
    is_past = jnp.arange(s) <= jnp.arange(t)[:, None] + s - t
    return (is_past & is_real(k, n)[:, None])[:, None]


@jax.jit
def at_the_beginning(x: jax.Array, n: jax.Array) -> jax.Array:
    """The last n[b] places of each row as its first ones."""
    places = (jnp.arange(x.shape[1]) - n[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, places[:, :, None, None], axis=1)


@jax.jit
def exact(q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
    """The attention of a left-padded cache in float32, row by row."""

    def of_row(row: tuple[jax.Array, ...]) -> jax.Array:
        q, k, v, is_seen = row
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # the heads of each group
        with jax.default_matmul_precision("float32"):
            scores = jnp.einsum("tkgh,skh->kgts", q, k) * q.shape[-1] ** -0.5
            weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf))
            out = jnp.einsum("kgts,skh->tkgh", weights, v)
        return out.reshape(q.shape[0], -1, v.shape[-1])

    return jax.lax.map(of_row, (q, k, v, seen(q, k, n)))


def programs_of(cell: Cell) -> dict[str, tuple[Call, list[jax.Array]]]:
    """Each form of a cell, with its arguments."""
    q, k, v = cell.arrays()
    n = cell.lengths()
    right = [q, at_the_beginning(k, n), at_the_beginning(v, n), n]
    forms = {x: y for x, y in FORMS.items() if cell.queries == 1 or x != "jax.nn lengths"}
    return {
        name: (form, right if name in PADDED_ON_THE_RIGHT else [q, k, v, n])
        for name, form in forms.items()
    }


def error_of(name: str, form: Call, arrays: list[jax.Array], expected: jax.Array) -> float | None:
    """The largest error of a form, as a share of the largest number expected.

    Raises AssertionError if it is too large. It is None for the whole cache, which has other keys.
    """
    found = jax.block_until_ready(jax.jit(form)(*arrays))
    if name == WHOLE:
        return None
    error = jnp.abs(found.astype(jnp.float32) - expected).max() / jnp.abs(expected).max()
    assert error < _LARGEST_ERROR, (name, float(error))
    return float(error)


def chosen(form: Call, arrays: list[jax.Array]) -> str:
    """What runs the form's call on this device, with the rewrites that it takes."""
    calls = explain_program(form, *arrays).calls
    if not calls:
        return "not ours"
    verdict = next(x for x in calls[0].explanation.forward if x.is_eligible)
    return ", ".join((verdict.implementation, *verdict.rewrites))


def measure(cell: Cell, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """For each form what runs it, its error and its times; after an error, only that."""
    rows, timed = {}, {}
    expected = exact(*cell.arrays(), cell.lengths())
    for name, (form, arrays) in programs_of(cell).items():
        try:
            row = {"runs": chosen(form, arrays), "error": error_of(name, form, arrays, expected)}
            timed[name] = (repeated(form), arrays)
            jax.block_until_ready(timed[name][0](*arrays))
        except AssertionError:
            raise
        except Exception as failure:  # jax.nn refuses some calls
            timed.pop(name, None)
            row = {"failed": str(failure).splitlines()[0][:300]}
        rows[name] = row
    square = len(orders(len(timed)))  # each form follows each other one equally often
    runs = {name: partial(seconds_per_call, *program) for name, program in timed.items()}
    times = turns(runs, -(-rounds // square) * square, seconds, least=2)
    for name, (run, arrays) in timed.items():
        rows[name] |= {
            "us": 1e6 * statistics.median(times[name]) / STEPS,
            "over_lengths": median_ratio(times, name, BESIDE),
            "device_us": device_us(partial(run, *arrays)),
        }
    return rows


def device_us(run: Callable[[], jax.Array]) -> float | None:
    """The microseconds per step for which kernels run; None where no profile says so."""
    found, _ = busy_seconds(lambda: jax.block_until_ready(run()))
    return None if found is None else 1e6 * found / STEPS


def show(cell: Cell, rows: dict[str, dict[str, Any]]) -> None:
    print(f"\n{cell}: us, the ratio to {BESIDE}, us on the device, error, what runs it")
    for name, row in rows.items():
        if "failed" in row:
            print(f"  {name:15s} failed: {row['failed'][:120]}", flush=True)
            continue
        device = "" if row["device_us"] is None else f"{row['device_us']:.1f}"
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        times = f"{row['us']:8.1f} {row['over_lengths']:6.3f} {device:>8s}"
        print(f"  {name:15s} {times} {error:>8s} {row['runs']}", flush=True)


def check() -> None:
    """Raise AssertionError if one of our forms differs from the float32 computation."""
    for cell in CHECKED:
        expected = exact(*cell.arrays(), cell.lengths())
        for name, (form, arrays) in programs_of(cell).items():
            if not name.startswith("jax.nn"):
                print(f"{cell}: {name:10s} {error_of(name, form, arrays, expected)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding with a left-padded cache.")
    parser.add_argument("--rounds", type=int, default=14, help="rounded up to a balanced order")
    parser.add_argument("--seconds", type=float, default=0.03, help="length of one measurement")
    parser.add_argument("--check", action="store_true", help="compare at small sizes, time nothing")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON")
    args = parser.parse_args()
    if args.check:
        return check()
    facts = environment()
    print(f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}")
    found = []
    for cell in CELLS:
        rows = measure(cell, args.rounds, args.seconds)
        show(cell, rows)
        found.append({"cell": str(cell), "shape": asdict(cell), "forms": rows})
        save("left_padding", {"environment": facts, "cells": found}, args.out)


if __name__ == "__main__":
    main()
