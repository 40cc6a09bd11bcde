"""The calls in which another peer is faster than ours."""

from __future__ import annotations

from attn_dispatch_tools.bench.markdown import TITLES, table_lines
from attn_dispatch_tools.bench.report import CellResults, Report

_LEVEL = 0.99
"""Peers whose time is this share of ours, or more, are level with it."""

_EXPLAINED = (
    f"Every call in which a peer takes less than {_LEVEL} of our time: the fastest one's share.",
    "Beside it the share of a second program that is the same as ours, under the name of the",
    "implementation: how far it is from 1 shows how much times vary.",
)


def lines(report: Report) -> list[str]:
    """The table of these calls; those with masks have tables of their own."""
    rows = [
        row
        for direction in TITLES
        for x in report.cells
        if x.cell.mask is None and (row := _row(x, direction))
    ]
    if not rows:
        return []
    head = ["", "fastest", "its time / ours", "ours again"]
    return ["## Where ours is not the fastest", "", *_EXPLAINED, "", *table_lines(head, rows), ""]


def _row(found: CellResults, direction: str) -> list[str] | None:
    names = found.results.get(direction, {})
    times = {x: found.value(direction, x, "wall_us", "median") for x in names}
    known = {x: us for x, us in times.items() if us is not None}
    ours = known.pop("ours", None)
    if ours is None or not known:
        return None
    again = known.pop(same_as_ours(found, direction), None)
    fastest = min(known, key=lambda x: known[x], default="")
    if not fastest or known[fastest] / ours >= _LEVEL:
        return None
    name = f"{found.cell.grid}: {found.cell.name}, {TITLES[direction]}"
    shares = (known[fastest] / ours, None if again is None else again / ours)
    return [name, fastest, *("-" if x is None else f"{x:.3f}" for x in shares)]


def same_as_ours(found: CellResults, direction: str) -> str:
    """The name of the peer that is ours under its implementation's name; empty if it has two."""
    notes = found.notes.get("ours", {})
    chosen = {notes.get(x) for x in ("forward", "backward") if x in direction}
    return f"ours: {chosen.pop()}" if len(chosen) == 1 else ""
