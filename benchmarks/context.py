"""One sequence over the GPUs of a host: every strategy beside one GPU.

usage: python benchmarks/context.py [--out FOLDER] [--time-limit S] [--only GLOB] [--values GLOB]
                                     [--direction both] [--rounds N]

First, values: 4,096 tokens in bfloat16 on all GPUs and on one, both against float32. Then times of
32k to 524k tokens, 32 heads on 8 (or 28 on 4), head dim 128: forward, and forward and backward. All
strategies and one GPU take turns in one run. Efficiency is the time of one GPU, divided by the
number of GPUs and by the time of all. A round of calls takes a tenth of a second at least, behind
which the dispatch of all but the first is hidden, as in a training step.

Arrays are sharded along the sequence by the mesh axis "context". "zigzag" and "documents" are rings
in a shard_map whose arrays are in that order before. "heads+ring" has two mesh axes and exchanges
heads along the second before a ring along the first.

Beside the times stand those of the cost model, and the bytes that a device sends in a call: as
modelled, counted in the compiled program, and as NVLink counts them where it does.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from command import save
from context_calls import CELLS, Cell, able, arrays, modelled, on_all, on_one

from attn_dispatch.sequence import restore
from attn_dispatch_tools.reports.environment import environment

GRADIENTS = ("out", "dq", "dk", "dv")
DIRECTIONS = ("both", "forward")
WITH_VALUES = tuple(x for x in CELLS if x.name.endswith("32k"))
"""The cells whose values are compared, of fewer tokens."""
ROUND = 0.1
"""The least seconds of a round."""
LONG = 10.0
"""Seconds of a round behind which no other begins."""


def strategies(cell: Cell) -> list[str]:
    """The strategies that all GPUs of this host can run."""
    return [x for x in cell.strategies if able(cell, x, jax.device_count())]


def errors(wanted: str = "*", tokens: int = 4096) -> Iterator[dict[str, Any]]:
    """The error of each result on all GPUs, divided by that on one, both beside float32."""
    devices = jax.device_count()
    for like in WITH_VALUES:
        if not fnmatch(like.name, wanted):
            continue
        options = {x: (255, 0) if x == "local_window_size" else y for x, y in like.options.items()}
        cell = replace(like, tokens=tokens, options=options)
        exact = replace(cell, options=options | {"implementation": "xla"})
        given = arrays(cell)
        with jax.default_matmul_precision("highest"):
            call = on_one(exact, "both", [x.astype(jnp.float32) for x in given])
        expected = jax.device_get(call())
        one = jax.device_get(on_one(cell, "both", given)())
        for strategy in strategies(cell):
            many = jax.device_get(on_all(cell, "both", strategy, given)())
            order = cell.order(strategy, devices)
            many = [restore(x, devices, order=order) for x in many]
            row: dict[str, Any] = {"cell": cell.name, "strategy": strategy}
            for name, want, a, b in zip(GRADIENTS, expected, one, many, strict=True):
                error = [
                    float(np.sqrt(np.mean((np.asarray(x, np.float32) - want) ** 2))) for x in (a, b)
                ]
                row[name] = error[1] / error[0]
            yield row


def seconds(call: Callable[[], Any], count: int) -> float:
    """The time of a call, of so many one after the other."""
    start = time.perf_counter()
    for _ in range(count - 1):
        call()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) / count


def calls_of_a_round(call: Callable[[], Any]) -> int:
    seconds(call, 1)
    first = seconds(call, 1)
    return 1 if first > ROUND else math.ceil(ROUND / seconds(call, 3))


def in_turn(calls: dict[str, Callable[[], Any]], counts: dict[str, int], rounds: int) -> Any:
    """The median milliseconds of each call. Every round begins with another one."""
    found: dict[str, list[float]] = {x: [] for x in calls}
    names, start = list(calls), time.perf_counter()
    for number in range(rounds):
        if time.perf_counter() - start > LONG:
            break
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if counts[name] > 1:
                seconds(calls[name], 1)
            found[name].append(seconds(calls[name], counts[name]))
    return {x: 1e3 * statistics.median(y) for x, y in found.items()}


def over_nvlink() -> list[int] | None:
    """The bytes that each GPU has sent over NVLink since it started; None where nobody counts."""
    command = ["nvidia-smi", "nvlink", "-gt", "d"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    counts = [
        sum(1024 * int(x) for x in re.findall(r"Data Tx: (\d+) KiB", gpu))
        for gpu in re.split(r"^GPU \d+:", text, flags=re.MULTILINE)[1:]
    ]
    return counts if any(counts) else None


def nvlink_mb(call: Callable[[], Any], count: int) -> float | None:
    """The bytes that a GPU sends over NVLink in a call, in MB: the mean of all GPUs."""
    before = over_nvlink()
    seconds(call, count)
    after = over_nvlink()
    if before is None or after is None:
        return None
    return (sum(after) - sum(before)) / len(after) / count / 1e6


def times(cell: Cell, direction: str, rounds: int) -> dict[str, Any]:
    given, devices = arrays(cell), jax.device_count()
    spread = {x: on_all(cell, direction, x, given) for x in strategies(cell)}
    calls = {"one GPU": on_one(cell, direction, given), **spread}
    counts = {x: calls_of_a_round(y) for x, y in calls.items()}
    ms = in_turn({**calls}, counts, rounds)
    model = {x: modelled(cell, x, direction, devices) for x in spread}
    return {
        "cell": cell.name, "direction": direction, "ms": ms,
        "efficiency": {x: ms["one GPU"] / devices / ms[x] for x in spread},
        "modelled_ms": {x: 1e3 * sum(part.seconds for part in y) for x, y in model.items()},
        "modelled_sent_mb": {x: sum(part.sent for part in y) / 1e6 for x, y in model.items()},
        "sent_mb": {x: y.sent_mb(devices) for x, y in spread.items()},
        "nvlink_mb": {x: nvlink_mb(y, counts[x]) for x, y in spread.items()},
        "temporary_mb": {x: y.temporary_mb for x, y in calls.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", action="append", metavar="GLOB", help="cells named like this")
    parser.add_argument(
        "--values", default="*", metavar="GLOB", help="cells of 32k whose values count; '': none"
    )
    parser.add_argument("--direction", choices=DIRECTIONS, help="both: forward and backward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=200)
    args = parser.parse_args()
    for glob in args.only or []:
        _check_matches(parser, "--only", glob, CELLS)
    if args.values:
        _check_matches(parser, "--values", args.values, WITH_VALUES)
    start = time.perf_counter()
    report: dict[str, Any] = {"environment": environment(), "devices": jax.device_count()}
    report |= {"values": [], "times": []}
    for row in errors(args.values):
        report["values"].append(row)
        print(_at(start), _text(row), flush=True)
    for cell in CELLS:
        for direction in [args.direction] if args.direction else DIRECTIONS:
            if (
                not any(fnmatch(cell.name, x) for x in args.only or ["*"])
                or time.perf_counter() - start > args.time_limit
            ):
                continue
            report["times"].append(times(cell, direction, args.rounds))
            print(_at(start), _text(report["times"][-1]), flush=True)
            save("context", report, args.out)


def _check_matches(
    parser: argparse.ArgumentParser, option: str, glob: str, cells: Sequence[Cell]
) -> None:
    names = [x.name for x in cells]
    if not any(fnmatch(x, glob) for x in names):
        expected = ", ".join(map(repr, names))
        parser.error(f"{option}: expected a glob that matches one of {expected}, got {glob!r}")


def _at(start: float) -> str:
    return f"{time.perf_counter() - start:4.0f} s"


def _text(row: Any) -> str:
    if isinstance(row, dict):
        return ", ".join(f"{x} {_text(y)}" for x, y in row.items())
    return f"{row:.3f}" if isinstance(row, float) else str(row)


if __name__ == "__main__":
    sys.exit(main())
