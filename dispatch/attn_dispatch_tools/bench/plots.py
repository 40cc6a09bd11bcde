"""Plots of a report: bars that compare the peers, and speed and memory against sequence length.

A peer has the same colour in all plots. Ours has the strongest, and its lines lie on top.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attn_dispatch_tools.bench import mask_plot
from attn_dispatch_tools.bench.behind import same_as_ours
from attn_dispatch_tools.bench.markdown import TITLES
from attn_dispatch_tools.bench.plot_frame import add_title, colours_of
from attn_dispatch_tools.bench.report import CellResults, Report
from attn_dispatch_tools.bench.table import IN_MICROSECONDS, in_order
from attn_dispatch_tools.reports.plot_style import STYLE
from attn_dispatch_tools.reports.svg_file import shorten

_MIN_LENGTHS = 3
"""The fewest lengths for a line plot. For fewer, the bars show as much."""


def draw(report: Report, folder: Path) -> list[Path]:
    """Write the plots of a report as SVG files into a folder, and return their paths.

    Each family of a grid has a bar plot, and a line plot if it has several lengths. The grid "long"
    also has a plot of memory against length. Masks have a plot of time against share of tiles.
    """
    colours = colours_of(report.peers)
    written: list[Path] = []

    def keep(figure: Figure, name: str) -> None:
        path = folder / (re.sub(r"[^\w.+-]+", "_", name) + ".svg")
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
        shorten(path)
        written.append(path)

    with matplotlib.rc_context(STYLE):
        if figure := mask_plot.draw(report, colours):
            keep(figure, "masks")
        for grid, name, cells in _families(report):
            if figure := _bars(report, grid, name, cells, colours):
                keep(figure, f"bars-{grid}-{name}" if name else f"bars-{grid}")
            if grid in IN_MICROSECONDS or len({x.cell.seq_len for x in cells}) < _MIN_LENGTHS:
                continue
            if figure := _lines(report, name, cells, colours, ("tflops",), "TFLOP/s", 1.0):
                keep(figure, f"lengths-{grid}-{name}")
            if grid != "long":
                continue
            mib = 1 / 2**20
            if figure := _lines(report, name, cells, colours, ("memory_bytes",), "MiB", mib):
                keep(figure, f"memory-{grid}-{name}")
    return written


def _families(report: Report) -> list[tuple[str, str, list[CellResults]]]:
    """(grid, family, cells by length) of each plot. A grid of few cells has one plot for all of its
    families, whose family is ""."""
    found: dict[tuple[str, str], list[CellResults]] = {}
    for x in in_order([x for x in report.cells if x.cell.mask is None]):
        is_one = x.cell.grid in IN_MICROSECONDS or x.cell.grid == "window"
        found.setdefault((x.cell.grid, "" if is_one else x.cell.family), []).append(x)
    return [(grid, family, cells) for (grid, family), cells in found.items()]


def _bars(
    report: Report, grid: str, family: str, cells: list[CellResults], colours: dict[str, str]
) -> Figure | None:
    """A bar plot: a row for each direction, a group of bars for each cell, a bar for each peer.

    If the bars are times, each cell has a panel, because times differ too much for one axis.
    """
    is_time = grid in IN_MICROSECONDS
    keys = ("wall_us", "median") if is_time else ("tflops",)
    directions = _directions(cells, keys, report.peers)
    if not directions:
        return None
    shown = _shown(report, cells, directions, keys)
    panels = [[x] for x in cells] if is_time else [cells]
    width = 0.19 * len(cells) * (len(shown) + 1.5) + (0.8 * len(panels))
    figure = Figure(figsize=(max(6.5, min(18.0, width)), 3.2 * len(directions) + 0.6))
    for i, direction in enumerate(directions):
        for j, panel in enumerate(panels):
            axes = figure.add_subplot(len(directions), len(panels), i * len(panels) + j + 1)
            _bars_of(axes, panel, direction, shown, colours, keys)
            axes.set_xticklabels([_cell_label(x, family) for x in panel], fontsize=9)
            if j == 0:
                axes.set_ylabel("µs (less is better)" if is_time else "TFLOP/s")
                axes.set_title(TITLES[direction], loc="left", fontsize=10, color="#40454d")
    add_title(figure, report, f"{grid}: {family}" if family else grid, shown, colours)
    return figure


def _bars_of(
    axes: Axes, cells: Sequence[CellResults], direction: str, shown: Sequence[str],
    colours: dict[str, str], keys: tuple[str, ...],
) -> None:  # fmt: skip
    step, highest = len(shown) + 1.5, 0.0
    for j, peer in enumerate(shown):
        for group, found in enumerate(cells):
            value = found.value(direction, peer, *keys)
            if value is None:
                continue
            highest = max(highest, value)
            strong = peer == "ours"
            spread = _spread(found, direction, peer) if keys[0] == "wall_us" else None
            axes.bar(
                group * step + j, value, 0.9, color=colours[peer], zorder=3 if strong else 2,
                edgecolor="#5c0714" if strong else "none", linewidth=1.0 if strong else 0,
                yerr=spread, error_kw={"elinewidth": 0.7, "ecolor": "#40454d"},
            )  # fmt: skip
            axes.annotate(
                _short(value), (group * step + j, value), xytext=(0, 3),
                textcoords="offset points", ha="center", va="bottom", rotation=90, fontsize=7,
                fontweight="bold" if strong else "normal", color="#24282e",
            )  # fmt: skip
    axes.set_xticks([group * step + (len(shown) - 1) / 2 for group in range(len(cells))])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, highest * 1.18 or 1)


def _lines(
    report: Report, family: str, cells: list[CellResults], colours: dict[str, str],
    keys: tuple[str, ...], unit: str, factor: float,
) -> Figure | None:  # fmt: skip
    """A line plot of a number against length: a panel for each direction, a line for each peer."""
    directions = _directions(cells, keys, report.peers)
    if not directions:
        return None
    shown = _shown(report, cells, directions, keys)
    figure = Figure(figsize=(5.6 * len(directions), 4.2))
    is_memory = keys == ("memory_bytes",)
    for i, direction in enumerate(directions):
        axes = figure.add_subplot(1, len(directions), i + 1)
        for peer in reversed(shown):  # ours is drawn last, above the others
            points = [
                (x.cell.seq_len, factor * value)
                for x in cells
                if (value := x.value(direction, peer, *keys)) is not None
            ]
            strong = peer == "ours"
            axes.plot(
                [x for x, _ in points], [y for _, y in points], color=colours[peer],
                marker="o", markersize=6 if strong else 4, linewidth=2.8 if strong else 1.5,
                zorder=4 if strong else 3,
            )  # fmt: skip
        lengths = sorted({x.cell.seq_len for x in cells})
        axes.set_xscale("log", base=2)
        if is_memory:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xticks(lengths)
        axes.set_xticklabels([_length(x) for x in lengths])
        axes.minorticks_off()
        axes.set_xlabel("sequence length")
        axes.set_ylabel(unit)
        axes.set_title(TITLES[direction], loc="left", fontsize=10, color="#40454d")
    title = f"{family}: memory of results and temporaries" if is_memory else family
    add_title(figure, report, title, shown, colours)
    return figure


def _directions(
    cells: Sequence[CellResults], keys: tuple[str, ...], peers: Sequence[str]
) -> list[str]:
    return [d for d in TITLES if any(_values(cells, d, x, keys) for x in peers)]


def _shown(
    report: Report, cells: Sequence[CellResults], directions: Sequence[str], keys: tuple[str, ...]
) -> list[str]:
    """The peers with a number, except one that is ours in every cell, under another name."""

    def is_ours(peer: str) -> bool:
        return all(same_as_ours(x, "forward_backward") == peer for x in cells)

    found = [x for x in report.peers if any(_values(cells, d, x, keys) for d in directions)]
    return [x for x in found if not is_ours(x)]


def _values(
    cells: Sequence[CellResults], direction: str, peer: str, keys: tuple[str, ...]
) -> list[float]:
    found = [x.value(direction, peer, *keys) for x in cells]
    return [x for x in found if x is not None]


def _spread(found: CellResults, direction: str, peer: str) -> list[list[float]]:
    """The distances from the median down to the first quartile and up to the third, in µs."""
    row = found.results[direction][peer]["wall_us"]
    low, high = row["quartiles"]
    return [[max(0.0, row["median"] - low)], [max(0.0, high - row["median"])]]


def _cell_label(found: CellResults, family: str) -> str:
    return found.cell.label if family else f"{found.cell.family}\n{found.cell.label}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
