"""A run: measures all cells, one after the other, and saves the report after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attn_dispatch_tools.bench.arrays import CellArrays
from attn_dispatch_tools.bench.cells import Cell
from attn_dispatch_tools.bench.measure import Options, measure
from attn_dispatch_tools.bench.peers.peer import Peer, first_line
from attn_dispatch_tools.bench.report import CellResults, Report
from attn_dispatch_tools.reports.environment import environment

_WARM_UP = Cell("warm up", "d128 causal", 1, 256, 8, 8, 128, 128)

MeasureCell = Callable[..., dict[str, dict[str, Any]]]
"""`measure.measure`, or what tests call in its place."""


def present(peers: Sequence[Peer]) -> tuple[list[Peer], dict[str, Any]]:
    """The peers that can be used here, and the environment with the versions of all peers and the
    messages that say why others are absent."""
    absent = {peer.name: peer.absent() for peer in peers}
    facts = environment()
    facts["peers"] = {peer.name: peer.version() for peer in peers}
    facts["absent"] = {name: why for name, why in absent.items() if why}
    return [peer for peer in peers if not absent[peer.name]], facts


def run(
    cells: Sequence[Cell],
    peers: Sequence[Peer],
    directions: Sequence[str],
    options: Options,
    report: Report,
    path: Path,
    measure: MeasureCell = measure,
) -> Iterator[CellResults]:
    """Measure the cells into `report`, and yield each when it is saved at `path`.

    A time limit ends the run between two measurements, an interrupt at any time. Either way, the
    report says so and is saved.
    """
    left = [f"{cell.grid}: {cell.name}" for cell in cells]
    try:
        _warm_up(peers)
        for cell in cells:
            if options.is_over():
                report.stopped = "time limit"
                break
            found = CellResults(cell)
            report.cells.append(found)
            arrays = CellArrays(cell)
            for direction in directions:
                if not options.is_over():
                    found.results[direction] = measure(cell, direction, peers, arrays, options)
            found.notes = _notes(cell, peers, arrays)
            left.pop(0)
            if options.is_over():
                report.stopped = "time limit"
            report.not_measured = [*left]
            report.write(path)
            yield found
    except KeyboardInterrupt:
        report.stopped = "interrupted"
    finally:
        for peer in peers:
            peer.close()
        report.not_measured = left
        report.write(path)


def _warm_up(peers: Sequence[Peer]) -> None:
    """Make every peer load its libraries, so that no cell's first call includes that time."""
    arrays = CellArrays(_WARM_UP)
    for peer in peers:
        try:
            if peer.concerns(_WARM_UP):
                peer.program(_WARM_UP, "forward_backward", arrays)
            peer.release()
        except Exception:
            continue  # the same error will be reported for the cells


def _notes(cell: Cell, peers: Sequence[Peer], arrays: CellArrays) -> dict[str, dict[str, Any]]:
    found = {}
    for peer in peers:
        if not peer.concerns(cell):
            continue
        try:
            if notes := peer.notes(cell, arrays):
                found[peer.name] = notes
        except Exception as error:
            found[peer.name] = {"reason": first_line(error)}
    return found
