"""Checks and times of FlashAttention-4's kernels, and their report, short enough to be kept."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attn_dispatch.fa4.compiled import KernelSet
from attn_dispatch_tools.reports.environment import environment, file_name
from tests.support.interval_attention import Check

Row = dict[str, Any]
Times = Mapping[str, Mapping[str, float]]


def row(case: str, result: str, error: float, allowed: float) -> Row:
    """A check of a result. `case` begins with the set's name."""
    is_right = error <= allowed  # False for NaN
    return {"case": case, "result": result, "error": error, "allowed": allowed, "right": is_right}


def relative_error(got: Any, exact: Any, least: float = 0.0) -> float:
    """The largest error, as a share of the reference's largest number or of `least`; inf if
    infinities or NaN are in different places."""
    x, y = (np.asarray(z).astype(np.float64) for z in (got, exact))
    assert x.shape == y.shape
    finite = np.isfinite(y)
    if not np.where(finite, np.isfinite(x), x == y).all():
        return float("inf")
    error, largest = (np.abs(z).max(initial=0) for z in (x[finite] - y[finite], y[finite]))
    return float(error / max(largest, least)) if error else 0.0


def rows_of(case: str, checks: Iterable[Check]) -> list[Row]:
    return [row(case, x.name, x.error, x.allowed) | {"right": x.is_right} for x in checks]


def check_sets(
    sets: Sequence[KernelSet],
    check: Callable[[KernelSet, float], Iterable[Row]],
    seconds: float,
) -> list[Row]:
    """The checks of every set, each of which ends at its time, so that none is left out."""
    rows: list[Row] = []
    started = time.monotonic()
    for i, kernels in enumerate(sets):
        found: list[Row] = []
        for x in check(kernels, started + seconds * (i + 1) / len(sets)):
            found.append(x)
            if not x["right"]:
                print(f"  WRONG {x}", flush=True)
        shares = ", ".join(f"{x} {y:.2f}" for x, y in _worst(found).items())
        print(f"{kernels.name} {kernels.variant_name}: {len(found)} checks; largest error / "
              f"allowed: {shares} [{time.monotonic() - started:.0f} s]", flush=True)  # fmt: skip
        rows += found
    return rows


def _worst(rows: Iterable[Row]) -> dict[str, float]:
    """The largest share of the allowed error of each result."""
    worst: dict[str, float] = {}
    for x in rows:
        share = x["error"] / x["allowed"] if x["allowed"] else float(x["error"] > 0)
        worst[x["result"]] = max(worst.get(x["result"], 0.0), share)
    return worst


def measured(programs: Mapping[str, Callable[[], object]], rounds: int = 6) -> dict[str, float]:
    """Microseconds of each program, the median over rounds that run them forth and back.

    A program that fails is named and left out.
    """

    def seconds(run: Callable[[], object], calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)][-1])
        return (time.perf_counter() - start) / calls

    calls: dict[str, int] = {}
    for name, run in programs.items():
        try:
            seconds(run, 2)
            calls[name] = max(5, int(0.04 / seconds(run, 5)))
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
            times[name].append(seconds(programs[name], calls[name]))
    return {name: round(1e6 * statistics.median(x), 1) for name, x in times.items()}


def write(folder: Path, prefix: str, versions: str, rows: Sequence[Row], times: Times) -> None:
    """Write the counts of checks, the wrong ones completely, and times in microseconds.

    Args:
      folder: where the file is written.
      prefix: the beginning of its name.
      versions: those of the kernels.
      rows: the checks.
      times: by call and then by what runs it.
    """
    facts = environment()
    by_set: dict[str, list[Row]] = {}
    for x in rows:
        by_set.setdefault(x["case"].split()[0], []).append(x)
    sets = {
        name: {"checks": len(x), "worst": {y: round(z, 3) for y, z in _worst(x).items()}}
        for name, x in by_set.items()
    }
    report = {
        "environment": facts,
        "versions": versions,
        "checks": len(rows),
        "wrong": [x for x in rows if not x["right"]],
        "sets": sets,
        "times_us": {x: {y: round(t, 1) for y, t in named.items()} for x, named in times.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_name(prefix, facts)}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
