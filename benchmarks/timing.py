"""Timing by turns: what is compared runs in the same minute, at the same clock of the card."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

Program = tuple[Callable[..., Any], Sequence[Any]]
"""A jitted function and its arguments."""


def seconds_per_call(function: Callable[..., Any], arrays: Sequence[Any], calls: int) -> float:
    """Mean wall time of `calls` calls queued back to back."""
    jax.block_until_ready(function(*arrays))
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = function(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def by_turns(
    programs: Mapping[str, Program], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds per call of each program, one entry for each round.

    A measurement takes about `seconds`; every other round goes through the programs backwards.
    """
    calls = {}
    for name, (function, arrays) in programs.items():
        seconds_per_call(function, arrays, 3)
        calls[name] = max(10, int(seconds / seconds_per_call(function, arrays, 10)))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for round_index in range(rounds):
        order = list(programs) if round_index % 2 == 0 else list(programs)[::-1]
        for name in order:
            times[name].append(seconds_per_call(*programs[name], calls[name]))
    return times


def median_ratio(times: Mapping[str, list[float]], over: str, under: str) -> float:
    """The median over the rounds of one program's time divided by another's."""
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))
