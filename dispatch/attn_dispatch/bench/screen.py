"""A run on the terminal: a bar while it lasts, or a line for each cell."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from attn_dispatch.bench.report import CellResults


def watched(cells: Iterable[CellResults], total: int) -> Iterator[CellResults]:
    """The same cells, shown as they come."""
    if not sys.stdout.isatty():
        yield from _plainly(cells, total)
        return
    try:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError:  # the bar is all that rich is needed for
        yield from _plainly(cells, total)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns) as progress:
        task = progress.add_task("Cells", total=total)
        for found in cells:
            progress.console.print(said(found), markup=False, highlight=False)
            progress.update(task, advance=1)
            yield found


def _plainly(cells: Iterable[CellResults], total: int) -> Iterator[CellResults]:
    for i, found in enumerate(cells, 1):
        print(f"[{i}/{total}] {said(found)}", flush=True)
        yield found


def said(found: CellResults) -> str:
    """One line: TFLOP/s of each peer, forward / with all gradients."""
    names: dict[str, None] = {}
    for results in found.results.values():
        names |= dict.fromkeys(results)
    parts = []
    for name in names:
        values = [found.value(direction, name, "tflops") for direction in found.results]
        parts.append(f"{name} " + "/".join("-" if x is None else _short(x) for x in values))
    return f"{found.cell.grid}: {found.cell.name}: {', '.join(parts)}"


def _short(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"
