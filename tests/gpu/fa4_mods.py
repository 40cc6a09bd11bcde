"""Checks FlashAttention-4's kernels that are compiled with score_mods, and measures them.

usage: python tests/gpu/fa4_mods.py [--set NAME ...] [--seconds N] [--times] [--out FOLDER]

The library is that of ATTN_DISPATCH_FA4_LIBRARY, or else where build-fa4 puts it; `--build` prints
the command that makes it, which needs no GPU. Every set with a mod runs masks of every kind in
several shapes: grouped heads, lengths that end within a tile, rows that see nothing. Results and
scratch memory are filled with NaN before every call. The exit status is 1 if an error exceeds what
is allowed: of a mod with tanh, also the error of the hardware's tanh, 2^-11.

--times measures causal calls of 8,192 rows of 32 heads on 8, head dim 128, with a soft cap and with
ALiBi, by fa4, cuDNN and XLA.
"""

from __future__ import annotations

import os

os.environ.setdefault("ATTN_DISPATCH_POISON", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import attn_dispatch
from attn_dispatch import mods
from attn_dispatch.fa4 import compiled
from attn_dispatch.fa4.compiled import KernelSet
from tests.gpu import kernel_report
from tests.gpu.fa4_kernels import differentiated
from tests.gpu.kernel_report import Row, measured
from tests.support import interval_attention as attention
from tests.support import interval_masks as intervals
from tests.support import interval_runs as runs
from tests.support import score_mods

# Batch, query rows, keys, query heads, key heads.
_SHAPES = ((2, 1000, 1000, 8, 2), (1, 777, 1500, 4, 4), (2, 512, 512, 8, 1))
_MASKS = ("causal", "window and sinks", "blocky", "documents")
_TANH_ERROR = 2.0**-11

SLOPES = 2.0 ** -jnp.arange(1.0, 9.0)
_START = jnp.zeros((1, 2), jnp.int32)


@dataclass(frozen=True)
class Known:
    """A mod, the arrays that its kernels read, and whether it takes a tanh."""

    mod: attention.ScoreMod
    arrays: tuple[jax.Array, ...] = ()
    has_tanh: bool = False

    @property
    def as_computed(self) -> attention.ScoreMod:
        """The mod with the error of the hardware's tanh."""
        return self._less_exact if self.has_tanh else self.mod

    def _less_exact(self, score: jax.Array, *indices: jax.Array) -> jax.Array:
        return self.mod(score, *indices) * (1 + _TANH_ERROR)

    __hash__ = object.__hash__


KNOWN = {
    "attn_dispatch.mods:soft_cap(50)": Known(mods.soft_cap(50), has_tanh=True),
    "attn_dispatch.mods:soft_cap(3)": Known(mods.soft_cap(3), has_tanh=True),
    "attn_dispatch.mods:alibi([1.0])": Known(mods.alibi(SLOPES), (SLOPES,)),
    "tests.support.score_mods:by_head_and_place": Known(
        score_mods.by_head_and_place, (_START, score_mods.DEPTHS, score_mods.GAINS), has_tanh=True
    ),
    "tests.support.score_mods:large_past_the_end": Known(score_mods.large_past_the_end),
}


_run = jax.jit(runs.results, static_argnames=("scale", "variant"))


def check_set(kernels: KernelSet, deadline: float) -> Iterator[Row]:
    """The checks of several masks in every shape."""
    known, dims = KNOWN[kernels.variant_name], (kernels.head_dim, kernels.head_dim_v)
    for seed, shape in enumerate(_SHAPES):
        inputs = attention.drawn(seed, shape, dims, kernels.dtype)
        found = intervals.masks(seed, shape[0], shape[1], shape[2])
        for mask in [x for x in _MASKS if x in found]:
            if time.monotonic() > deadline:
                return
            case = f"{kernels.name} {kernels.variant_name} {list(shape)} {mask}"
            checks = check_mask(kernels, known, inputs, found[mask])
            yield from kernel_report.rows_of(case, checks)


def check_mask(
    kernels: KernelSet, known: Known, inputs: attention.Inputs, rows: np.ndarray
) -> list[attention.Check]:
    """The checks of one call. Scores are twice as large as usual, to bend them."""
    scale = 2 * kernels.head_dim**-0.5
    operands = runs.mask_operands(rows, inputs, kernels.variant)
    got = _run(inputs, operands, scale, kernels.variant, known.arrays)
    return runs.checks(inputs, rows, got, scale, known.mod, known.as_computed)


def check_all(library: compiled.CompiledLibrary, patterns: list[str], seconds: float) -> list[Row]:
    sets = [x for x in library.sets if x.variant_name in KNOWN and x.arch == "sm90"]
    sets = [x for x in sets if any(fnmatch.fnmatchcase(x.name, y) for y in patterns)]
    return kernel_report.check_sets(sets, check_set, seconds)


def time_calls(length: int = 8192) -> dict[str, dict[str, float]]:
    """Microseconds of forward (f) and forward with backward (f+b), by implementation."""
    inputs = attention.drawn(0, (1, length, length, 32, 8), (128, 128), "bfloat16")
    arrays = (inputs.query, inputs.key, inputs.value)
    slopes = 2.0 ** -(jnp.arange(1.0, 33.0) / 4)
    cases = {
        "no change": {},
        "soft cap 50": {"logits_soft_cap": 50.0},
        "ALiBi": {"alibi_slopes": jax.lax.stop_gradient(slopes)},
    }
    found = {}
    for name, options in cases.items():
        calls = {x: _call(x, options) for x in ("fa4", "cudnn", "xla")}
        given = (*arrays, inputs.out_grad)
        forward = {x: partial(jax.jit(y), *arrays) for x, y in calls.items()}
        both = {x: partial(differentiated(y), *given) for x, y in calls.items()}
        for what, programs in (("f", forward), ("f+b", both)):
            times = measured(programs, rounds=4)
            print(f"causal, {name}, {what}: {times}", flush=True)
            found[f"causal, {name}, {what}"] = times
    return found


def _call(implementation: str, options: dict) -> Callable[..., jax.Array]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attn_dispatch.dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation, **options
        )

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", dest="sets", help="a pattern of sets' names")
    parser.add_argument("--seconds", type=float, default=200, help="the time for checks")
    parser.add_argument("--times", action="store_true", help="measure as well")
    parser.add_argument("--build", action="store_true", help="print the command of the build")
    parser.add_argument("--out", type=Path, help="a folder for the numbers")
    args = parser.parse_args()
    if args.build:
        mods_of_build = " ".join(f"--mod '{x}'" for x in KNOWN)
        sys.exit(print(f"attn-dispatch build-fa4 --set '*_d128_bfloat16' {mods_of_build}"))
    library = compiled.find()
    if not library.is_usable:
        sys.exit(f"error: {library.unusable_reason}")
    compiled.register()
    print(f"{library.path}: {library.versions}; {jax.devices()[0].device_kind}", flush=True)
    rows = check_all(library, args.sets or ["*"], args.seconds)
    wrong = sum(not x["right"] for x in rows)
    times: dict[str, dict[str, float]] = {}
    if args.times:
        del os.environ["ATTN_DISPATCH_POISON"]
        times = time_calls()
    if args.out:
        kernel_report.write(args.out, "fa4_mods", library.versions, rows, times)
    print(f"{len(rows)} checks, {wrong} wrong", flush=True)
    sys.exit(1 if wrong or not rows else 0)


if __name__ == "__main__":
    main()
