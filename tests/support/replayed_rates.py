"""The regret that an order of implementations would have had on measured calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch_tools.bench.regret.timed_call import FORWARD, STEP
from attn_dispatch_tools.rates.observations import Measured, times_of

First = Callable[[AttentionSpec, Sequence[str], bool], str]
"""The first of some implementations for a pass, in a program of its own (True) or not."""


@dataclass(frozen=True)
class Replayed:
    """A measured call in one direction, and what would be chosen for it."""

    measured: Measured
    chosen: tuple[str, ...]
    """The implementation of each pass."""
    best: str
    microseconds: float
    least: float
    is_device: bool
    """Whether the times are the device's own."""

    @property
    def ratio(self) -> float:
        return self.microseconds / self.least

    def __str__(self) -> str:
        row = self.measured.row
        name = row.get("name") or f"{row['kind']} {row['call']} {row.get('mods', '')}"
        what = f"{self.measured.direction}{' on the device' if self.is_device else ''}"
        chosen = "+".join(dict.fromkeys(self.chosen))
        return (
            f"{self.ratio:.3f}  {what}: {chosen} {self.microseconds:.0f}, {self.best} "
            f"{self.least:.0f} us: {name}"
        )


def replayed(measured: Sequence[Measured], first: First) -> list[Replayed]:
    """The regret of each measured call that several implementations ran."""
    found = (
        _replayed(x, first, is_device=is_device) for x in measured for is_device in (False, True)
    )
    return [x for x in found if x is not None]


def _replayed(x: Measured, first: First, *, is_device: bool) -> Replayed | None:
    times = x.device if is_device else x.wall
    if len(times) < 2:
        return None
    chosen = tuple(first(spec, tuple(times), not is_device) for spec in x.passes)
    taken = times[chosen[-1]]
    if x.direction == STEP and chosen[0] != chosen[1]:
        forward = times_of(x.row, FORWARD)[is_device]
        if not set(chosen) <= forward.keys():
            return None
        taken += forward[chosen[0]] - forward[chosen[1]]
    best = min(times, key=times.__getitem__)
    return Replayed(x, chosen, best, taken, times[best], is_device)
