"""A run on the terminal: a bar while it lasts, or a line for each cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attn_dispatch.bench.report import CellResults
from attn_dispatch.terminal.progress import progress


def watched(cells: Iterable[CellResults], total: int) -> Iterator[CellResults]:
    """The same cells, each shown when it comes."""
    with progress("Cells", total) as shown:
        for i, found in enumerate(cells, 1):
            shown.say(f"[{i}/{total}] {said(found)}")
            shown.step()
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
    return f"{found.cell.grid}: {found.cell.name}: {', '.join(parts)} TFLOP/s"


def _short(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"
