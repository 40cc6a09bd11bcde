"""A process that compiles a share of the calls and, when its turn comes, times one of them."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import jax

from attn_dispatch.core.tuning.timing import orders, seconds_per_call, turns
from attn_dispatch.devices.target import default_device
from attn_dispatch_tools.bench.device_time import busy_seconds_of_each
from attn_dispatch_tools.bench.regret.contestants import Contest, contest
from attn_dispatch_tools.bench.regret.timed_call import TimedCall

_HOPELESS = 2.5
"""A program that takes this many times the best time is timed once."""
_SHORT = 1e-3
"""Programs of fewer seconds are all timed, because a single measurement of them says little."""
_LEAST_ROUNDS = 4
_LAUNCHES = 150.0
"""Where the best program takes fewer microseconds, the device's own time is measured as well: such
programs wait for the host, which launches them."""
_PROFILED = 5


def work(
    pipe: Connection,
    calls: Sequence[tuple[int, TimedCall]],
    seconds: float,
    compile_until: float,
    is_alone: bool,
) -> None:
    """Compile the calls, say so, and then time each call whose number the pipe names.

    Args:
      pipe: to the process that decides whose turn it is.
      calls: the calls with their numbers.
      seconds: the length of one measurement.
      compile_until: no compilation begins after this time (`time.time`).
      is_alone: whether peers are left out.
    """
    warnings.simplefilter("ignore")
    device = default_device()
    jax.device_put(0.0).block_until_ready()
    ready: dict[int, Contest] = {}

    def prepare(number: int, call: TimedCall) -> None:
        if time.time() < compile_until:
            ready[number] = contest(call, device, has_peers=not is_alone)

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(prepare, *x) for x in calls]
        problems = [str(x.exception()) for x in waiting if x.exception() is not None]
    pipe.send((sorted(ready), problems))
    while (number := pipe.recv()) is not None:
        try:
            pipe.send(measured(ready.pop(number), seconds))
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {str(error)[:200]}"})


def measured(found: Contest, seconds: float) -> dict[str, Any]:
    """The line of a call: itself, what the default runs, and microseconds by direction and name."""
    row, arrays = found.call.to_json(), found.inputs
    row["default"] = found.chosen
    for direction, programs in found.programs.items():
        if programs:
            row[direction] = _times(found, direction, arrays, seconds)
        if min(row.get(direction, {}).values(), default=1e6) < _LAUNCHES:
            row[f"{direction}_device"] = _busy(programs, arrays)
    if found.failed:
        row["failed"] = found.failed
    return row


def _busy(programs: Mapping[str, Any], arrays: Sequence[object]) -> dict[str, float]:
    """Microseconds for which the device works for a call of each program."""

    def runs(program: Any) -> Callable[[], object]:
        return lambda: jax.block_until_ready([program(*arrays) for _ in range(_PROFILED)])

    found = busy_seconds_of_each([runs(x) for x in programs.values()])
    times = [] if found is None else found
    return {x: _rounded(y / _PROFILED) for x, y in zip(programs, times, strict=False)}


def _rounded(seconds: float) -> float:
    """Microseconds with four digits."""
    return float(f"{1e6 * seconds:.4g}")


def _times(
    found: Contest, direction: str, arrays: Sequence[object], seconds: float
) -> dict[str, float]:
    once: dict[str, float] = {}
    for name, program in found.programs[direction].items():
        try:
            once[name] = min(seconds_per_call(program, arrays, 2) for _ in range(2))
        except Exception as error:
            found.failed[f"{name}, {direction}"] = str(error)[:200]
    best = min(once.values(), default=0.0)
    kept = [x for x in once if once[x] <= max(_HOPELESS * best, _SHORT)]
    timed = {x: partial(seconds_per_call, found.programs[direction][x], arrays) for x in kept}
    count = len(orders(len(timed))) if timed else 1
    rounds = count * -(-_LEAST_ROUNDS // count)
    in_turns = {x: statistics.median(y) for x, y in turns(timed, rounds, seconds).items()}
    return {x: _rounded(y) for x, y in (once | in_turns).items()}
