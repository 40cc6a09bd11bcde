"""The display of a run on the terminal: a progress bar or a line for each cell, then a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attn_dispatch_tools.bench.cells import DENSE_CAUSAL
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
    """One line with the TFLOP/s of each peer, with a slash between directions.

    For a mask it has times, and in brackets `over_dense` (measure.py).
    """
    names: dict[str, None] = {}
    for results in found.results.values():
        names |= dict.fromkeys(results)
    entry, unit = (_speed, "TFLOP/s") if found.cell.mask is None else (_mask_time, "µs")
    parts = [f"{x} " + "/".join(entry(found, y, x) for y in found.results) for x in names]
    return f"{found.cell.grid}: {found.cell.name}: {', '.join(parts)} {unit}"


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
    known = {x: y for x, y in times.items() if y and x != DENSE_CAUSAL}
    return min(known, key=lambda x: known[x]) if known else None


def _time(found: CellResults, direction: str, peer: str) -> float | None:
    return found.value(direction, peer, "wall_us", "median")


def _speed(found: CellResults, direction: str, peer: str) -> str:
    tflops = found.value(direction, peer, "tflops")
    return "-" if tflops is None else _short(tflops)


def _mask_time(found: CellResults, direction: str, peer: str) -> str:
    us, ratio = _time(found, direction, peer), found.value(direction, peer, "over_dense")
    if us is None:
        return "-"
    return f"{us:.0f}" if ratio is None else f"{us:.0f} ({ratio:.2f})"


def _short(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"
