"""What all plots of a report share: a peer's colour, the title and the legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from attn_dispatch_tools.bench.cells import DENSE_CAUSAL
from attn_dispatch_tools.bench.report import Report

_COLOURS = {
    "ours": "#c8102e",
    "ours: cudnn": "#e98a95",
    "ours: flash": "#f4b9bf",
    "ours: fa4": "#7d0a1e",
    "ours: xla": "#d9a3ad",
    "ours: finite padding": "#ffb000",
    "ours: segment ids": "#e2711d",
    "ours: padded": "#f3b884",
    "jax.nn: cudnn": "#1f5fa8",
    "jax.nn: xla": "#9cc3e6",
    "dew-flash-attn": "#2a8c4a",
    "fa4-jax": "#6b3fa0",
    "flash_attn3_jax": "#b79fd9",
    "tokamax": "#149a9a",
    "torch: cudnn": "#55585c",
    "torch: flash": "#a9adb3",
    "torch: flex": "#2f3e8f",
    DENSE_CAUSAL: "#24282e",
}
_OTHER_COLOURS = ("#8c6d31", "#ce6dbd", "#637939", "#d6a62c")
_LEGEND_COLUMNS = 3
"""So few that a phone, which shows the left half of a plot, shows the whole legend."""


def add_title(
    figure: Figure, report: Report, title: str, shown: Sequence[str], colours: Mapping[str, str]
) -> None:
    """Make room at the top for the title, what was measured on, and the legend."""
    facts = report.environment
    versions = f"{facts['device']}, cuDNN {facts['cudnn']}, JAX {facts['jax']}, bfloat16"
    legend_height = 0.19 * -(-len(shown) // _LEGEND_COLUMNS)
    height = figure.get_figheight() + legend_height
    figure.set_figheight(height)
    figure.tight_layout(h_pad=1.6, rect=(0, 0, 1, 1 - (0.55 + legend_height) / height))
    figure.text(0.01, 1.0, title, fontsize=13, fontweight="bold", ha="left", va="top")
    below = 1 - 0.27 / height
    figure.text(0.01, below, versions[:120], fontsize=9, color="#5b616b", ha="left", va="top")
    legend = figure.legend(
        handles=[Patch(color=colours[x], label=x) for x in shown], ncols=_LEGEND_COLUMNS,
        loc="upper left", bbox_to_anchor=(0.01, 1 - 0.5 / height), borderaxespad=0, borderpad=0,
        handlelength=1.4, columnspacing=1.4, frameon=False, fontsize=9,
    )  # fmt: skip
    for text in legend.get_texts():
        if text.get_text() == "ours":
            text.set_fontweight("bold")


def colours_of(peers: Sequence[str]) -> dict[str, str]:
    others = cycle(_OTHER_COLOURS)
    return {name: _COLOURS.get(name) or next(others) for name in peers}
