"""One cell in one direction: every peer's program, checked, timed by turns and profiled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch.core.tuning.timing import orders, turns
from attn_dispatch_tools.bench.arrays import Arrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.peers.peer import Peer, Program, first_line

MOST_DIFFERENCE = 0.1
"""The largest allowed difference, as a share of the largest number; others are not timed."""


@dataclass(frozen=True)
class Options:
    """How a cell is measured."""

    rounds: int | None = None
    """None: as many as it takes for each program to have followed each other one equally often."""
    seconds: float = 0.02
    """The length of one measurement."""
    device_time: bool = True
    deadline: float = float("inf")
    """On time.monotonic()'s clock: after it nothing is begun, and rounds end with the current."""

    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline


class _Guarded:
    """A program whose failure, whenever it comes, is kept as a reason."""

    def __init__(self, program: Program):
        self.program = program
        self.reason = ""

    def seconds(self, calls: int) -> float:
        """Infinity once it has failed."""
        if not self.reason:
            try:
                return self.program.seconds(calls)
            except Exception as error:
                self.reason = first_line(error)
        return float("inf")


def measure(
    cell: Cell, direction: str, peers: Sequence[Peer], arrays: Arrays, options: Options
) -> dict[str, dict[str, Any]]:
    """For each peer by its name either a "reason", or what was measured.

    wall_us: of a call, "median", "min" and "quartiles" over the rounds. device_us: what of it the
    device worked, or None and "device_reason". tflops: by the median. memory_bytes, first_call_ms:
    see `jax_program`. difference: from the first peer's results, as a share of the largest number.
    """
    found: dict[str, dict[str, Any]] = {}
    programs: dict[str, _Guarded] = {}
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
        if difference is None or difference <= MOST_DIFFERENCE:
            programs[peer.name] = _Guarded(program)
        else:  # also if the difference is NaN
            found[peer.name] = {
                "reason": f"its results differ by {difference:.2g} of the largest number",
                "difference": difference if difference == difference else None,
            }
    expected = None
    _add_times(found, programs, cell.flops(direction), options)
    for peer in peers:
        _release(peer)
    return found


def _add_times(
    found: dict[str, dict[str, Any]],
    programs: dict[str, _Guarded],
    flops: float,
    options: Options,
) -> None:
    rounds = len(orders(len(programs))) if options.rounds is None else options.rounds
    timed: dict[str, Callable[[int], float]] = {x: y.seconds for x, y in programs.items()}
    times = turns(timed, rounds, options.seconds, is_over=options.is_over)
    for name, guarded in programs.items():
        if guarded.reason:
            found[name] = {"reason": guarded.reason}
            continue
        median = statistics.median(times[name])
        found[name] |= {
            "wall_us": {
                "median": 1e6 * median,
                "min": 1e6 * min(times[name]),
                "quartiles": [1e6 * x for x in quartiles(times[name])],
            },
            "rounds": len(times[name]),
            "tflops": flops / median / 1e12,
        } | _device(guarded.program, median, flops, options)


def _device(program: Program, wall: float, flops: float, options: Options) -> dict[str, Any]:
    if not options.device_time or options.is_over():
        return {"device_us": None, "device_reason": "not asked for, or out of time"}
    calls = max(1, min(20, int(options.seconds / wall)))
    try:
        seconds, reason = program.device_seconds(calls)
    except Exception as error:
        seconds, reason = None, first_line(error)
    if not seconds:
        return {"device_us": None, "device_reason": reason}
    return {"device_us": 1e6 * seconds, "device_tflops": flops / seconds / 1e12}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of a single value that value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _difference(results: Sequence[jax.Array], expected: Sequence[jax.Array]) -> float:
    """The largest difference as a share of the largest number, of the array where it is worst."""
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
