"""The Markdown table of a report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from attn_dispatch_tools.bench import behind, mask_table
from attn_dispatch_tools.bench.markdown import TITLES, number, table_lines
from attn_dispatch_tools.bench.report import CellResults, Report

IN_MICROSECONDS = ("small", "layers", "packed")
"""The grids whose numbers are times, because TFLOP/s say little about tiny calls, or about packed
sequences that some peers pad."""


def markdown(report: Report) -> str:
    """The tables of a report: every cell with every peer, then the reasons for missing numbers."""
    facts = report.environment
    commits = ", ".join(x[:12] for x in facts["commit"].split(", "))
    lines = [
        f"# Attention on {facts['device']}",
        "",
        f"cuDNN {facts['cudnn']}, JAX {facts['jax']}, driver {facts['driver']}, "
        f"{facts['date'][:10]}, commit {commits}. bfloat16.",
        "TFLOP/s by wall time: 4 · B · T² · N · H forward, halved by causality, 3.5 times that",
        "with the backward pass. The best of a row is bold.",
        "",
    ]
    if report.stopped:
        lines += [
            f"Stopped ({report.stopped}) with {len(report.not_measured)} cells not measured.", ""
        ]  # fmt: skip
    grids = dict.fromkeys(x.cell.grid for x in report.cells if x.cell.mask is None)
    lines += mask_table.lines(report)
    for grid in grids:
        cells = [x for x in report.cells if x.cell.grid == grid]
        for direction in TITLES:
            for is_device in (False, True):
                lines += _table(grid, direction, cells, report.peers, is_device)
    if any(_peak(x, name) for x in report.cells for name in report.peers):
        lines += _memory(report)
    lines += behind.lines(report)
    lines += _first_calls(report)
    lines += _reasons(report)
    lines += ["## Versions", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {version or '-'} |" for name, version in facts["peers"].items()]
    lines += ["", *(f"{name}: {reason}  " for name, reason in facts["absent"].items())]
    return "\n".join(lines).rstrip() + "\n"


def in_order(cells: Sequence[CellResults]) -> list[CellResults]:
    """The cells grouped by family, in order of appearance, and sorted by length within a family."""
    families = [*dict.fromkeys(x.cell.family for x in cells)]
    return sorted(cells, key=lambda x: (families.index(x.cell.family), x.cell.seq_len))


def _table(
    grid: str,
    direction: str,
    cells: Sequence[CellResults],
    peers: Sequence[str],
    is_device: bool,
) -> list[str]:
    is_time = grid in IN_MICROSECONDS
    if is_device:
        keys = ("device_us",) if is_time else ("device_tflops",)
    else:
        keys = ("wall_us", "median") if is_time else ("tflops",)
    shown = [x for x in peers if any(c.value(direction, x, *keys) is not None for c in cells)]
    if not shown:
        return []
    rows = []
    for found in in_order(cells):
        values = [found.value(direction, name, *keys) for name in shown]
        known = [x for x in values if x is not None]
        best = (min if is_time else max)(known) if known else None
        rows.append([found.cell.name, *(number(x, x == best) for x in values)])
    unit = ("µs" if is_time else "TFLOP/s") + (" of device time" if is_device else "")
    return [f"## {grid}, {TITLES[direction]}, {unit}", "", *table_lines(["", *shown], rows), ""]


def _memory(report: Report) -> list[str]:
    rows = [
        [f"{x.cell.grid}: {x.cell.name}", *(_mib(_peak(x, name)) for name in report.peers)]
        for x in in_order([x for x in report.cells if x.cell.grid == "long"])
    ]
    if not rows:
        return []
    title = "## Memory of results and temporaries, forward and backward, MiB"
    return [title, "", *table_lines(["", *report.peers], rows), ""]


def _first_calls(report: Report) -> list[str]:
    rows = []
    for direction, title in TITLES.items():
        totals = [
            [x.value(direction, name, "first_call_ms", "total") for x in report.cells]
            for name in report.peers
        ]
        known = [[x for x in values if x is not None] for values in totals]
        if any(known):
            rows.append([title, *(number(statistics.median(x) if x else None) for x in known)])
    if not rows:
        return []
    title = "## First call of a new shape, from tracing to its result, ms; median of the cells"
    return [title, "", *table_lines(["", *report.peers], rows), ""]


def _peak(found: CellResults, peer: str) -> float | None:
    return found.value("forward_backward", peer, "memory_bytes")


def _reasons(report: Report) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for x in report.cells:
        for direction, results in x.results.items():
            for name, row in results.items():
                if "reason" in row:
                    where = f"{x.cell.grid}: {x.cell.name}, {TITLES[direction]}"
                    found.setdefault((name, row["reason"]), []).append(where)
    if not found:
        return []
    lines = ["## No number, and why", ""]
    for (name, reason), where in found.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        lines.append(f"- {name}: {_escaped(reason)} ({where[0]}{more})")
    return [*lines, ""]


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
