"""Regret: the default's time over that of the best implementation that can run the call by name."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_dispatch.core import select
from attn_dispatch_tools.bench.regret.contestants import DEFAULT
from attn_dispatch_tools.bench.regret.peers import PEERS
from attn_dispatch_tools.bench.regret.timed_call import FORWARD, STEP

DIRECTIONS = (FORWARD, STEP)
_WORST = 10


@dataclass(frozen=True)
class Regret:
    """A timed call in one direction, judged."""

    row: Mapping[str, Any]
    direction: str
    chosen: str
    microseconds: float
    best: str
    least: float
    """The time of the best implementation of this package."""
    peer: str
    """The fastest peer; "" if none ran the call."""
    peer_microseconds: float

    @property
    def ratio(self) -> float:
        return self.microseconds / self.least

    def __str__(self) -> str:
        mods = self.row.get("mods", "")
        call = " ".join(f"{name}={x}" for name, x in self.row["call"].items())
        return (
            f"{self.ratio:.2f}  {self.direction}, {self.row['kind']}: {self.chosen} "
            f"{self.microseconds:.0f}, {self.best} {self.least:.0f} us: {call} {mods}".rstrip()
        )


def regrets(rows: Iterable[Mapping[str, Any]]) -> list[Regret]:
    """The regret of each line in each direction that was timed."""
    return [x for row in rows for d in DIRECTIONS if (x := _regret(row, d)) is not None]


def _regret(row: Mapping[str, Any], direction: str) -> Regret | None:
    times: Mapping[str, float] = row.get(direction, {})
    chosen = row["default"].get(direction, "")
    taken = times.get(DEFAULT, times.get(chosen))
    named = {x: y for x, y in times.items() if x in select.names()}
    if taken is None or not named:
        return None
    best = min(named, key=named.__getitem__)
    others = {x: times[x] for x in (peer.NAME for peer in PEERS) if x in times}
    peer = min(others, key=others.__getitem__, default="")
    return Regret(
        row, direction, chosen, taken, best, named[best], peer, others.get(peer, float("nan"))
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def table(found: Sequence[Regret]) -> list[str]:
    """The lines of the summary: quantiles by direction, the worst calls, and the peers."""
    lines: list[str] = []
    for direction in DIRECTIONS:
        of = [x for x in found if x.direction == direction]
        if not of:
            continue
        ratios = [x.ratio for x in of]
        shares = ", ".join(
            f"{100 * sum(x > over for x in ratios) / len(ratios):.0f} % over {over}"
            for over in (1.05, 1.15)
        )
        lines.append(
            f"{direction}, {len(of)} calls: median {statistics.median(ratios):.3f}, 95 % "
            f"{quantile(ratios, 0.95):.3f}, worst {max(ratios):.3f}; {shares}"
        )
        beside = [x.microseconds / x.peer_microseconds for x in of if x.peer]
        if beside:
            lines.append(
                f"  over the fastest peer, {len(beside)} calls: median "
                f"{statistics.median(beside):.2f}, 95 % {quantile(beside, 0.95):.2f}, "
                f"worst {max(beside):.2f}"
            )
        lines += [f"  {x}" for x in sorted(of, key=lambda x: -x.ratio)[:_WORST]]
    return lines
