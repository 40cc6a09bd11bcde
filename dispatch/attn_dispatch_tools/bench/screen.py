"""The display of a run on the terminal: a progress bar or a line for each cell, then a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attn_dispatch_tools.bench.report import CellResults, Report
from attn_dispatch_tools.terminal import style
from attn_dispatch_tools.terminal.progress import progress


def watched(cells: Iterable[CellResults], total: int) -> Iterator[CellResults]:
    """Yields the same cells, and shows each one as it arrives."""
    with progress("Cells", total) as shown:
        for i, found in enumerate(cells, 1):
            shown.print_line(f"[{i}/{total}] {summary_line(found)}")
            shown.step()
            yield found


def summary_line(found: CellResults) -> str:
    """One line with the TFLOP/s of each peer, with a slash between directions."""
    names: dict[str, None] = {}
    for results in found.results.values():
        names |= dict.fromkeys(results)
    parts = []
    for name in names:
        values = [found.value(direction, name, "tflops") for direction in found.results]
        parts.append(f"{name} " + "/".join("-" if x is None else _short(x) for x in values))
    return f"{found.cell.grid}: {found.cell.name}: {', '.join(parts)} TFLOP/s"


def show(report: Report) -> None:
    """Show how often each peer was the fastest. The report's file has the times."""
    directions = [*dict.fromkeys(x for cell in report.cells for x in cell.results)]
    rows = []
    for name in report.peers:
        firsts = [sum(_fastest(cell, x) == name for cell in report.cells) for x in directions]
        measured = sum(any(_time(x, y, name) for y in directions) for x in report.cells)
        rows.append([name, str(measured), *map(str, firsts)])
    if not rows:
        return
    head = ["peer", "cells", *(x.replace("_", "+") for x in directions)]
    text = f"\nfastest by wall time: number of cells\n\n{style.table(head, rows)}\n"
    style.show(text, {r"(?m)^(?:fastest by|peer ).*": style.HEADING, style.RULE: style.QUIET})


def _fastest(found: CellResults, direction: str) -> str | None:
    times = {x: _time(found, direction, x) for x in found.results.get(direction, {})}
    known = {x: y for x, y in times.items() if y}
    return min(known, key=lambda x: known[x]) if known else None


def _time(found: CellResults, direction: str, peer: str) -> float | None:
    return found.value(direction, peer, "wall_us", "median")


def _short(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"
