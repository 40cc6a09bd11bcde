"""Drawing panels as pictures with matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from attn_dispatch_tools.pictures.panel import Figure, Panel, Picture, shortened
from attn_dispatch_tools.reports.svg_file import shorten

ATTENDS, HIDDEN, PADDING, INK = "#2a6fb0", "#dfe3e8", "#f6e3b4", "#222222"

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "attn-dispatch",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 7,
    "text.color": INK,
}

_CENTRED: dict[str, Any] = {"ha": "center", "va": "center_baseline", "size": 6}

_CELL = 0.17
"""The side of a cell in inches."""

_DOTS_PER_INCH = 200
_MAX_DOTS = 6000
"""The most dots along a side. A larger picture has fewer dots per inch."""

_MAX_NUMBERS = 2**14
"""The most numbers in a picture. matplotlib takes 10 KB for each, and a second for some thousands.
"""
_KINDS = (".svg", ".png")


def draw(figure: Figure, path: Path) -> None:
    """Write one figure as SVG or PNG, according to the name of the file.

    The same version of matplotlib always writes the same bytes. The file's description holds the
    figure as text.

    Raises:
      ValueError: the name has another suffix, or there are too many numbers to draw.
    """
    if path.suffix.lower() not in _KINDS:
        raise ValueError(f"expected a file that ends with {' or '.join(_KINDS)}, got {path}")
    widths = [max(_width(panel) for panel in column) for column in zip(*figure.rows, strict=True)]
    heights = [max(panel.seq_len_q for panel in row) for row in figure.rows]
    gap = 3  # cells before each panel, for titles and labels
    width, height = (sum(sizes) + gap * len(sizes) + 0.5 for sizes in (widths, heights))
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(width * _CELL, height * _CELL), facecolor="white")
        axes = canvas.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        top = gap
        for row, row_height in zip(figure.rows, heights, strict=True):
            left = gap / 2
            for panel, column_width in zip(row, widths, strict=True):
                _draw_panel(axes, panel, left, top)
                left += column_width + gap
            top += row_height + gap
        metadata: dict[str, Any] = {"Description": figure.text()}
        if path.suffix.lower() == ".svg":
            metadata["Date"] = None
        dots = min(_DOTS_PER_INCH, _MAX_DOTS / (max(width, height) * _CELL))
        canvas.savefig(path, metadata=metadata, dpi=dots)
    if path.suffix.lower() == ".svg":
        shorten(path)


def _width(panel: Panel) -> int:
    """The width of a panel in cells. A title may be wider than the mask below it."""
    return max(panel.seq_len_kv, math.ceil(0.46 * len(panel.title)))


def _draw_panel(axes: Any, panel: Panel, left: float, top: float) -> None:
    picture = panel.picture
    count = 0 if picture.numbers is None else int(picture.mask.sum())
    if count > _MAX_NUMBERS:
        raise ValueError(f"expected at most {_MAX_NUMBERS:,} numbers to draw, got {count:,}")
    axes.text(left, top - 1.3, panel.title, va="bottom", weight="bold")
    for color, cells in _cells(picture).items():
        squares = [_square(left + j, top + i) for i, j in np.argwhere(cells)]
        if squares:
            outline = Outline.make_compound_path(*squares)
            patch = PathPatch(outline, facecolor=color, edgecolor="white", linewidth=0.8)
            axes.add_patch(patch).set_clip_on(False)
    for i, label in enumerate(_labels(panel, "query")):
        axes.text(left - 0.3, top + i + 0.5, label, **_CENTRED | {"ha": "right"})
    for j, label in enumerate(_labels(panel, "key_value")):
        axes.text(left + j + 0.5, top - 0.5, label, **_CENTRED)
    if picture.numbers is None:
        rows, columns = np.nonzero(picture.diagonal)
        axes.scatter(left + columns + 0.5, top + rows + 0.5, s=4, color="white", linewidths=0,
                     clip_on=False)  # fmt: skip
        return
    numbers = np.asarray(picture.numbers)
    for i, j in np.argwhere(picture.mask):
        number = shortened(numbers[i, j])
        axes.text(left + j + 0.5, top + i + 0.5, number, color="white", **_CENTRED)


def _cells(picture: Picture) -> dict[str, np.ndarray]:
    """bool [T, S] for each colour: the cells that have it."""
    mask, padding = np.asarray(picture.mask), np.asarray(picture.padding)
    return {ATTENDS: mask, PADDING: padding, HIDDEN: ~mask & ~padding}


def _square(left: float, top: float) -> Outline:
    corners = [(left, top), (left + 1, top), (left + 1, top + 1), (left, top + 1), (left, top)]
    return Outline(corners, closed=True)


def _labels(panel: Panel, side: str) -> list[str]:
    """The labels of one side: its segment ids, or positions if it has none."""
    ids = panel.arguments.get(f"{side}_segment_ids")
    if ids is None:  # one array serves both sides
        both = (panel.arguments.get(f"{x}_segment_ids") for x in ("query", "key_value"))
        ids = next((x for x in both if x is not None), None)
    length = panel.seq_len_q if side == "query" else panel.seq_len_kv
    return [str(x) for x in (range(length) if ids is None else ids[0])]
