"""Times drawn calls: several processes compile at once, then one at a time has the device."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attn_dispatch.files import writing
from attn_dispatch_tools.bench.regret.timed_call import TimedCall
from attn_dispatch_tools.bench.regret.worker import work

_LONGEST = 60.0
"""Seconds after which a process that times one call is given up."""


def timed_rows(
    calls: Sequence[TimedCall],
    *,
    processes: int,
    seconds: float,
    time_limit: float,
    is_alone: bool,
) -> Iterator[dict[str, Any]]:
    """The line of each call, in order, until the time is over.

    Args:
      calls: the calls.
      processes: how many compile at once. While one times a call, the others wait.
      seconds: the length of one measurement.
      time_limit: seconds for everything; calls that are not compiled by half of it are left out.
      is_alone: whether peers are left out.
    """
    started = time.time()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPU
    workers = _started(calls, processes, seconds, started + 0.55 * time_limit, is_alone)
    try:
        ready = _compiled(workers, started + 0.8 * time_limit)
        print(f"{len(ready)} of {len(calls)} calls compiled in {time.time() - started:.0f} s")
        for number in sorted(ready):
            if time.time() - started > time_limit:
                break
            row = _measured(ready[number], number)
            if "error" in row:
                print(f"call {number}: {row['error']}")
            else:
                yield {"number": number, **row}
    finally:
        for process, _ in workers:
            process.kill()


_Worker = tuple[Any, Connection]
"""A process and the pipe to it."""


def _started(
    calls: Sequence[TimedCall], processes: int, seconds: float, until: float, is_alone: bool
) -> list[_Worker]:
    context = multiprocessing.get_context("spawn")
    workers: list[_Worker] = []
    for i in range(processes):
        here, there = context.Pipe()
        share = [*enumerate(calls)][i::processes]
        process = context.Process(
            target=work, args=(there, share, seconds, until, is_alone), daemon=True
        )
        process.start()
        there.close()
        workers.append((process, here))
    return workers


def _compiled(workers: Sequence[_Worker], until: float) -> dict[int, Connection]:
    """The numbers of the calls that are ready to be timed, each with the pipe to its process."""
    ready: dict[int, Connection] = {}
    for _, pipe in workers:
        if not pipe.poll(max(1.0, until - time.time())):
            continue
        numbers, problems = pipe.recv()
        ready |= dict.fromkeys(numbers, pipe)
        for problem in problems:
            print(f"not compiled: {problem[:300]}")
    return ready


def _measured(pipe: Connection, number: int) -> dict[str, Any]:
    """The line of a call, or {"error": …} if its process ended or takes too long."""
    try:
        pipe.send(number)
        if not pipe.poll(_LONGEST):
            pipe.close()
            return {"error": f"no time within {_LONGEST:.0f} s"}
        return pipe.recv()
    except (EOFError, OSError) as error:
        return {"error": f"the process that timed it ended: {error}"}


def save(path: Path, facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the report, with one line for each call."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    text = f'{{"environment":{json.dumps(facts)},\n"calls":[\n{lines}\n]}}\n'
    writing.replace(path, text.encode())
