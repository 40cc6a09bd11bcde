"""The matplotlib style of the plots in all reports."""

from typing import Any

STYLE: Any = {
    "font.size": 10,
    "svg.fonttype": "none",  # keep text as text
    "font.sans-serif": ["DejaVu Sans"],  # a list of ten is repeated at each text
    "svg.hashsalt": "attn-dispatch",  # so that the same numbers make the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e6e9",
    "grid.linewidth": 0.8,
    "axes.edgecolor": "#8a8f98",
    "xtick.color": "#40454d",
    "ytick.color": "#40454d",
}
