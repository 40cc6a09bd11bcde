"""Plots of a report: each error as a share of the allowed error, by family and by result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from attn_dispatch_tools.reports.plot_style import STYLE
from attn_dispatch_tools.verify.outcome import Outcome
from attn_dispatch_tools.verify.report import Report

_GOOD, _BAD, _LIMIT = "#1f5fa8", "#c8102e", "#40454d"
_EDGE = 1.25
"""The share at which all larger ones are drawn."""
_RESULTS = {"out": "output", "lse": "log-sum-exp", "row_max": "row maximum"}
"""The results that are not gradients."""


@dataclass(frozen=True)
class Row:
    """One row of a plot."""

    name: str
    shares: Sequence[float]
    """Errors as shares of the allowed error; above 1 is wrong."""
    label: str


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw two SVG files and return their paths; none if all cases were refused."""
    drawn = (
        ("families", "by family: the worst result of each case", by_family(report.outcomes)),
        ("results", "by result: each result and gradient of each case", by_result(report.outcomes)),
    )
    written = []
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x"}):
        for name, title, rows in drawn:
            if any(row.shares for row in rows):
                path = folder / f"{name}.svg"
                figure = _strips(rows, f"Share of the allowed error {title}")
                figure.savefig(path, metadata={"Date": None}, bbox_inches="tight", dpi=160)
                written.append(path)
    return written


def by_family(outcomes: Sequence[Outcome]) -> list[Row]:
    """The largest share of each case; infinity for a crash or a failure without a number."""
    grouped: dict[str, list[Outcome]] = {}
    for x in outcomes:
        grouped.setdefault(x.family, []).append(x)
    rows = []
    for name, cases in grouped.items():
        shares = [x.used for x in cases if x.errors and x.status == "passed"]
        bad = [x.used for x in cases if x.status in ("failed", "crashed")]
        shares += [math.inf if x <= 1 else x for x in bad]
        refused = sum(x.status == "refused" for x in cases)
        rows.append(Row(name, shares, _label(shares, "case", refused)))
    return rows


def by_result(outcomes: Sequence[Outcome]) -> list[Row]:
    """The share of each result; first results, then gradients."""
    grouped: dict[str, list[float]] = {}
    for x in outcomes:
        for name, error in x.errors.items():
            grouped.setdefault(name, []).append(error / x.allowances[name])
    results = [x for x in _RESULTS if x in grouped]
    gradients = sorted(x for x in grouped if x not in _RESULTS)
    gradients.sort(key=lambda x: -len(grouped[x]))
    names = [*results, *gradients]
    return [
        Row(_RESULTS.get(x, f"gradient of {x}"), grouped[x], _label(grouped[x], "array"))
        for x in names
    ]


def _label(shares: Sequence[float], of_what: str, refused: int = 0) -> str:
    parts = [f"{len(shares)} {of_what}{'s' * (len(shares) > 1)}"] if shares else []
    if bad := sum(not x <= 1 for x in shares):
        parts.append(f"{bad} wrong")
    if refused:
        parts.append(f"{refused} refused")
    if shares and not bad:
        parts.append(f"worst {max(shares):.2f}")
    return ", ".join(parts)


def _strips(rows: Sequence[Row], title: str) -> Figure:
    """A figure with a line for each row, and on it a dot for each share."""
    figure = Figure(figsize=(8.0, 0.8 + 0.29 * len(rows)))
    axes = figure.add_subplot()
    spread = np.random.default_rng(0)
    for i, row in enumerate(rows):
        shares = np.nan_to_num(np.array(row.shares, float), nan=_EDGE, posinf=_EDGE)
        shares = np.minimum(shares, _EDGE)
        heights = i + spread.uniform(-0.3, 0.3, len(shares))
        is_bad = np.array([not x <= 1 for x in row.shares], bool)
        for where, colour, size in ((~is_bad, _GOOD, 7), (is_bad, _BAD, 22)):
            axes.scatter(  # as pixels: some thousand circles would be a megabyte
                shares[where], heights[where], s=size, color=colour, linewidths=0,
                alpha=0.35 if colour == _GOOD else 1, rasterized=True, zorder=3,
            )  # fmt: skip
        axes.annotate(
            row.label, (1.01, i), xycoords=("axes fraction", "data"), va="center", fontsize=8,
            color=_BAD if is_bad.any() else _LIMIT,
        )  # fmt: skip
    is_any_bad = any(not x <= 1 for row in rows for x in row.shares)
    axes.axvline(1, color=_BAD, linewidth=1.2, zorder=2)
    axes.set_xlim(0, _EDGE + 0.03 if is_any_bad else 1.05)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("error / allowed error; right of the line is wrong")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    return figure
