"""One sequence over the GPUs of a host: every strategy beside one GPU.

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

import math
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from context_calls import CELLS, Cell, able, arrays, modelled, on_all, on_one
from harness import Script

from attn_dispatch.sequence import restore

GRADIENTS = ("out", "dq", "dk", "dv")
DIRECTIONS = ("both", "forward")
ROUND = 0.1
"""The least seconds of a round."""
LONG = 10.0
"""Seconds of a round behind which no other begins."""


def strategies(cell: Cell) -> list[str]:
    """The strategies that all GPUs of this host can run."""
    return [x for x in cell.strategies if able(cell, x, jax.device_count())]


def errors(like: Cell, tokens: int = 4096) -> dict[str, dict[str, float]]:
    """By strategy, the error of each result on all GPUs over that on one, both beside float32."""
    devices = jax.device_count()
    options = {x: (255, 0) if x == "local_window_size" else y for x, y in like.options.items()}
    cell = replace(like, tokens=tokens, options=options)
    exact = replace(cell, options=options | {"implementation": "xla"})
    given = arrays(cell)
    with jax.default_matmul_precision("highest"):
        call = on_one(exact, "both", [x.astype(jnp.float32) for x in given])
        expected = jax.device_get(call())
    one, found = jax.device_get(on_one(cell, "both", given)()), {}
    for strategy in strategies(cell):
        order = cell.order(strategy, devices)
        many = jax.device_get(on_all(cell, "both", strategy, given)())
        many = [restore(x, devices, order=order) for x in many]
        found[strategy] = {
            name: rms(y - want) / rms(x - want)
            for name, want, x, y in zip(GRADIENTS, expected, one, many, strict=True)
        }
    return found


def rms(x: Any) -> float:
    """The root mean square."""
    return float(np.sqrt(np.mean(np.asarray(x, np.float32) ** 2)))


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
        "ms": ms,
        "efficiency": {x: ms["one GPU"] / devices / ms[x] for x in spread},
        "modelled_ms": {x: 1e3 * sum(part.seconds for part in y) for x, y in model.items()},
        "modelled_sent_mb": {x: sum(part.sent for part in y) / 1e6 for x, y in model.items()},
        "sent_mb": {x: y.sent_mb(devices) for x, y in spread.items()},
        "nvlink_mb": {x: nvlink_mb(y, counts[x]) for x, y in spread.items()},
        "temporary_mb": {x: y.temporary_mb for x, y in calls.items()},
    }  # fmt: skip


def main() -> None:
    script = Script("context", __doc__, rounds=5)
    script.parser.add_argument("--direction", choices=DIRECTIONS, help="both: forward and backward")
    script.parser.add_argument("--time-limit", type=float, default=200)
    script.parser.add_argument("--without-values", action="store_true")
    args, start = script.start(), time.perf_counter()
    script.report["devices"] = jax.device_count()
    by_name = {x.name: x for x in CELLS}
    names = [*script.chosen(by_name)]
    for name in names:
        if name.endswith("32k") and not args.without_values:
            script.keep("values", name, errors(by_name[name]))
    for name in names:
        for direction in [args.direction] if args.direction else DIRECTIONS:
            if time.perf_counter() - start < args.time_limit:
                row = times(by_name[name], direction, args.rounds)
                script.keep("times", f"{name}, {direction}", row)


if __name__ == "__main__":
    main()
