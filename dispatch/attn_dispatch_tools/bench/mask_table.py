"""The tables of masks: times, and times relative to dense attention on the tiles that are seen."""

from __future__ import annotations

from attn_dispatch_tools.bench.cells import DENSE_CAUSAL
from attn_dispatch_tools.bench.markdown import TITLES, number, table_lines
from attn_dispatch_tools.bench.report import CellResults, Report

_EXPLAINED = (
    "Shares are those of a causal call's pairs, and of its tiles of 128 x 128. In brackets: the",
    "time divided by the share of tiles and by the time of FlashAttention-3 with causality alone,",
    "which was measured in turns with the others.",
)


def lines(report: Report) -> list[str]:
    """The tables of the cells with masks, one for each length and direction; shares ascend."""
    found = [x for x in report.cells if x.cell.mask is not None]
    made: list[str] = []
    for seq_len in sorted({x.cell.seq_len for x in found}):
        cells = by_share([x for x in found if x.cell.seq_len == seq_len])
        for direction in TITLES:
            made += _table(seq_len, direction, cells, report.peers)
    return ["## masks", "", *_EXPLAINED, "", *made] if made else []


def by_share(cells: list[CellResults]) -> list[CellResults]:
    """Cells with masks, in order of their shares of tiles."""
    return sorted(cells, key=tiles_of)


def tiles_of(found: CellResults) -> float:
    """A cell's share of tiles."""
    shares = found.cell.shares
    assert shares is not None
    return shares.tiles


def _table(seq_len: int, direction: str, cells: list[CellResults], peers: list[str]) -> list[str]:
    keys = ("wall_us", "median")
    shown = [x for x in peers if any(c.value(direction, x, *keys) is not None for c in cells)]
    if not shown:
        return []
    rows = []
    for found in cells:
        times = {x: found.value(direction, x, *keys) for x in shown}
        known = [us for x, us in times.items() if us is not None and x != DENSE_CAUSAL]
        cells_of_row = [
            _entry(us, found.value(direction, x, "over_dense"), us == min(known, default=None))
            for x, us in times.items()
        ]
        rows.append([found.cell.family, *_shares(found), *cells_of_row])
    title = f"### {seq_len:,} tokens, {TITLES[direction]}, µs"
    return [title, "", *table_lines(["", "pairs", "tiles", *shown], rows), ""]


def _shares(found: CellResults) -> tuple[str, str]:
    shares = found.cell.shares
    assert shares is not None
    return f"{100 * shares.pairs:.1f} %", f"{100 * shares.tiles:.1f} %"


def _entry(us: float | None, over_dense: float | None, is_best: bool) -> str:
    ratio = "" if over_dense is None else f" ({over_dense:.2f})"
    return number(us, is_best) + ratio
