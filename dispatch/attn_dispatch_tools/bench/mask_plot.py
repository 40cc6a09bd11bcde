"""The plot of masks: time against the share of tiles that are seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attn_dispatch_tools.bench.cells import DENSE_CAUSAL
from attn_dispatch_tools.bench.markdown import TITLES
from attn_dispatch_tools.bench.mask_table import by_share, tiles_of
from attn_dispatch_tools.bench.plot_frame import add_title
from attn_dispatch_tools.bench.report import CellResults, Report

_TIME = ("wall_us", "median")


def draw(report: Report, colours: Mapping[str, str]) -> Figure | None:
    """A panel for each direction and length, with a dot for each mask and peer; None without such
    cells. No line joins the dots, as the masks are unrelated.

    The dashed line is FlashAttention-3's time for a causal call times the share.
    """
    cells = [x for x in report.cells if x.cell.mask is not None]
    lengths = sorted({x.cell.seq_len for x in cells})
    directions = [d for d in TITLES if any(_is_timed(x, d, report.peers) for x in cells)]
    if not directions:
        return None
    shown = [p for p in report.peers if any(_is_timed(x, d, [p]) for x in cells for d in TITLES)]
    figure = Figure(figsize=(5.6 * len(lengths), 4.0 * len(directions)))
    for i, direction in enumerate(directions):
        for j, seq_len in enumerate(lengths):
            axes = figure.add_subplot(len(directions), len(lengths), i * len(lengths) + j + 1)
            panel = by_share([x for x in cells if x.cell.seq_len == seq_len])
            _panel(axes, panel, direction, shown, colours)
            title = f"{TITLES[direction]}, {seq_len:,} tokens"
            axes.set_title(title, loc="left", fontsize=10, color="#40454d")
    add_title(
        figure, report, "masks: time against the share of a causal call's tiles", shown, colours
    )
    return figure


def _panel(
    axes: Axes, cells: Sequence[CellResults], direction: str, shown: Sequence[str],
    colours: Mapping[str, str],
) -> None:  # fmt: skip
    for peer in reversed(shown):  # ours is drawn last, above the others
        points = [
            (100 * tiles_of(x), us / 1000 * (tiles_of(x) if peer == DENSE_CAUSAL else 1))
            for x in cells
            if (us := x.value(direction, peer, *_TIME)) is not None
        ]
        strong = peer in ("ours", "ours: fa4")
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=colours[peer],
            linestyle="--" if peer == DENSE_CAUSAL else "",
            marker="" if peer == DENSE_CAUSAL else "o", markersize=7 if strong else 5,
            linewidth=1.5, zorder=4 if strong else 3,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xticks([5, 10, 20, 50, 100])
    axes.minorticks_off()
    axes.set_xlabel("% of the tiles of a causal call")
    axes.set_ylabel("ms")


def _is_timed(found: CellResults, direction: str, peers: Sequence[str]) -> bool:
    return any(found.value(direction, x, *_TIME) is not None for x in peers)
