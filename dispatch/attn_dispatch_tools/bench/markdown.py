"""Lines and numbers of Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

TITLES = {
    "forward": "forward",
    "backward": "backward alone",
    "forward_backward": "forward and backward",
}
"""What readers are told of a direction."""


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = "|".join(["---", *["---:"] * (len(head) - 1)])
    return [f"| {' | '.join(x)} |" for x in (head,)] + [f"|{ruler}|"] + [
        f"| {' | '.join(x)} |" for x in rows
    ]  # fmt: skip


def number(value: float | None, is_best: bool = False) -> str:
    if value is None:
        return "-"
    text = f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    return f"**{text}**" if is_best else text
