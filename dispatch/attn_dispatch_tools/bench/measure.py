"""One cell in one direction: every peer's program is checked, timed in turns and profiled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch.core.tuning.timing import orders, turns
from attn_dispatch_tools.bench.arrays import CellArrays
from attn_dispatch_tools.bench.cells import DENSE_CAUSAL, Cell
from attn_dispatch_tools.bench.peers.peer import MeasuredProgram, Peer, first_line

MAX_DIFFERENCE = 0.1
"""The largest allowed difference from our results, as a share of the largest number. A peer that
differs more is not timed."""


@dataclass(frozen=True)
class Options:
    """How a cell is measured."""

    rounds: int | None = None
    """None: as many as it takes for each program to follow every other one equally often."""
    seconds: float = 0.02
    """The length of one measurement."""
    device_time: bool = True
    deadline: float = float("inf")
    """The time, on the clock of time.monotonic(), after which no measurement or round begins."""

    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline


class _GuardedProgram:
    """A program that keeps the message of its first failure, and does not raise."""

    def __init__(self, program: MeasuredProgram):
        self.program = program
        self.failure = ""

    def seconds(self, calls: int) -> float:
        """Wall time per call; infinity after a failure."""
        if not self.failure:
            try:
                return self.program.seconds(calls)
            except Exception as error:
                self.failure = first_line(error)
        return float("inf")


def measure(
    cell: Cell, direction: str, peers: Sequence[Peer], arrays: CellArrays, options: Options
) -> dict[str, dict[str, Any]]:
    """By name of each peer, either the "reason" for missing numbers, or these numbers:

    - wall_us: the "median", "min" and "quartiles", over the rounds, of the wall time of a call.
    - device_us: the time for which a call keeps the device busy, or None and a "device_reason".
    - tflops: computed from the median; device_tflops from device_us.
    - memory_bytes, first_call_ms: see `MeasuredProgram`.
    - over_dense, in cells with a mask: the wall time divided by the mask's share of tiles and by
      the time of the peer `DENSE_CAUSAL`. 1 is dense attention's speed on the tiles that are seen.
    - difference: the difference from the first peer's results, as a share of the largest number.
    """
    found: dict[str, dict[str, Any]] = {}
    programs: dict[str, _GuardedProgram] = {}
    expected: list[jax.Array] | None = None
    for peer in peers:
        if not peer.concerns(cell):
            continue
        if options.is_over():
            found[peer.name] = {"reason": "not measured: the time limit was reached"}
            continue
        try:
            program = peer.program(cell, direction, arrays)
            results = program.results()
            difference = None
            if results is not None:
                expected = results if expected is None else expected
                difference = _difference(results, expected)
        except Exception as error:  # a package may raise anything, which becomes the reason
            found[peer.name] = {"reason": first_line(error)}
            continue
        found[peer.name] = program.facts | {"difference": difference}
        if difference is None or difference <= MAX_DIFFERENCE:
            programs[peer.name] = _GuardedProgram(program)
        else:  # also if the difference is NaN
            found[peer.name] = {
                "reason": f"its results differ by {difference:.2g} of the largest number",
                "difference": difference if difference == difference else None,
            }
    expected = None
    _add_times(found, programs, cell.flops(direction), options)
    _add_over_dense(found, cell)
    for peer in peers:
        _release(peer)
    return found


def _add_times(
    found: dict[str, dict[str, Any]],
    programs: dict[str, _GuardedProgram],
    flops: float,
    options: Options,
) -> None:
    rounds = len(orders(len(programs))) if options.rounds is None else options.rounds
    timed: dict[str, Callable[[int], float]] = {x: y.seconds for x, y in programs.items()}
    times = turns(timed, rounds, options.seconds, is_over=options.is_over)
    is_profiled = False
    for name, guarded in programs.items():
        if guarded.failure:
            found[name] = {"reason": guarded.failure}
            continue
        median = statistics.median(times[name])
        if not is_profiled:
            # Discarded: on an H200, the first profile after the turns had times up to a quarter
            # longer than a later one of the same program.
            _device(guarded.program, median, flops, options)
            is_profiled = True
        found[name] |= {
            "wall_us": {
                "median": 1e6 * median,
                "min": 1e6 * min(times[name]),
                "quartiles": [1e6 * x for x in quartiles(times[name])],
            },
            "rounds": len(times[name]),
            "tflops": flops / median / 1e12,
        } | _device(guarded.program, median, flops, options)


def _add_over_dense(found: dict[str, dict[str, Any]], cell: Cell) -> None:
    shares, dense = cell.shares, found.get(DENSE_CAUSAL, {}).get("wall_us")
    if shares is None or dense is None:
        return
    for key in ("tflops", "device_tflops"):
        found[DENSE_CAUSAL].pop(key, None)  # it computes more than the cell
    for name, row in found.items():
        if "wall_us" in row and name != DENSE_CAUSAL:
            row["over_dense"] = row["wall_us"]["median"] / (shares.tiles * dense["median"])


def _device(
    program: MeasuredProgram, wall: float, flops: float, options: Options
) -> dict[str, Any]:
    """The device time of a call; `wall` is its wall time in seconds."""
    if not options.device_time or options.is_over():
        return {"device_us": None, "device_reason": "not measured: switched off, or out of time"}
    calls = max(1, min(20, int(options.seconds / wall)))
    try:
        seconds, reason = program.device_seconds(calls)
    except Exception as error:
        seconds, reason = None, first_line(error)
    if not seconds:
        return {"device_us": None, "device_reason": reason}
    return {"device_us": 1e6 * seconds, "device_tflops": flops / seconds / 1e12}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile. Of a single value, both are that value."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _difference(results: Sequence[jax.Array], expected: Sequence[jax.Array]) -> float:
    """The largest difference of any result, as a share of that result's largest number."""
    return float(jnp.max(jnp.stack([_share(*x) for x in zip(results, expected, strict=True)])))


@jax.jit
def _share(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))


def _release(peer: Peer) -> None:
    try:
        peer.release()
    except Exception:
        pass  # the peer's next program will raise the same error
