"""Timing jitted calls in turns, and comparing their times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial

from attn_dispatch.core.tuning.timing import JittedCall, seconds_per_call, turns


def by_turns(
    programs: Mapping[str, JittedCall], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds per call of each program, one entry for each round.

    A measurement takes about `seconds`, and at least ten calls.
    """
    timed = {name: partial(seconds_per_call, *program) for name, program in programs.items()}
    return turns(timed, rounds, seconds, least=10)


def median_ratio(times: Mapping[str, list[float]], over: str, under: str) -> float:
    """The median over the rounds of one program's time divided by another's."""
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))
