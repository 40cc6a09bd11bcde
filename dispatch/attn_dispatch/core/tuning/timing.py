"""Timing in turns: compared programs run in the same minute, at the same clock of the card.

A card at its power limit runs a program at a different clock after a light program than after a
heavy one. So over the rounds each program follows each other one equally often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import jax

JittedCall = tuple[Callable[..., object], Sequence[object]]
"""A jitted function and its arguments."""

Timer = Callable[[int], float]
"""A function that runs a program a number of times and returns seconds per call."""


def seconds_per_call(
    function: Callable[..., object], arrays: Sequence[object], calls: int
) -> float:
    """Mean wall time of `calls` calls queued back to back."""
    jax.block_until_ready(function(*arrays))
    start = time.perf_counter()
    result: object = None
    for _ in range(calls):
        result = function(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def orders(count: int) -> list[tuple[int, ...]]:
    """Orders of `count` programs, in which each follows each other one equally often.

    For an even count this is Williams' Latin square: as many orders as programs, each program once
    in each place. An odd count needs each order backwards as well.
    """
    half = [(-(-i // 2) if i % 2 else count - i // 2) % count for i in range(1, count)]
    square = [tuple((x + shift) % count for x in (0, *half)) for shift in range(count)]
    if count % 2 == 0 or count == 1:
        return square
    return [order for row in square for order in (row, row[::-1])]


def turns(
    timed: Mapping[str, Timer],
    rounds: int,
    seconds: float,
    *,
    least: int = 1,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, list[float]]:
    """Seconds per call of each program, one entry for each round; a measurement takes `seconds`.

    Args:
      least: the smallest number of calls of a measurement.
      is_over: asked after each round; once it is true, no further round begins.
    """
    calls: dict[str, int] = {}
    for name, run in timed.items():
        few = max(least, int(seconds / run(2) / 4))
        calls[name] = max(least, int(seconds / run(few)))
    times: dict[str, list[float]] = {name: [] for name in timed}
    names = list(timed)
    square = orders(len(names)) if names else []
    for round_index in range(rounds if names else 0):
        if round_index and is_over():
            break
        for place in square[round_index % len(square)]:
            name = names[place]
            times[name].append(timed[name](calls[name]))
    return times
