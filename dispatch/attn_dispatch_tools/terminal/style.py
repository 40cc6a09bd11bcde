"""How what commands print looks. The words and where they stand are the same everywhere; on a
terminal rich adds colours, and takes nothing away: it wraps no line and cuts no cell."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attn_dispatch.console import console
from attn_dispatch_tools.terminal.text import width

Marks = dict[str, str]
"""Regular expression → how what it finds looks; one with a group means the group."""

HEADING, GOOD, BAD, NOT, QUIET = "bold", "green", "bold red", "yellow", "dim"
"""Whatever stands above others; works; is wrong; does not run, for a reason; matters less."""

RULE = r"(?m)^-+$"


def show(text: str, marks: Marks | None = None) -> None:
    """Print a text of one or more lines."""
    shown_on = console()
    if shown_on is None:
        print(text, flush=True)
        return
    from rich.text import Text

    shown = Text(text)
    for pattern, style in (marks or {}).items():
        for found in spans(pattern, text):
            shown.stylize(style, *found)
    shown_on.print(shown, soft_wrap=True)


def spans(pattern: str, text: str) -> list[tuple[int, int]]:
    """Where a mark is: the first group of each match that has one, else all of it."""
    return [x.span(1 if x.re.groups else 0) for x in re.finditer(pattern, text)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, has_sum: bool = False) -> str:
    """Columns of which the first is text and the others numbers, as wide as what is in them.

    Where that is wider than the terminal, each row has a line for each of its cells.

    Args:
      has_sum: the last row is that of all others.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) > width():
        return _stacked(head, rows)
    lines = []
    for name, *cells in (head, *rows):
        aligned = (x.rjust(size) for x, size in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *aligned]).rstrip())
    rule = "-" * max(map(len, lines))
    lines.insert(1, rule)
    if has_sum:
        lines.insert(-1, rule)
    return "\n".join(lines)


def _stacked(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    label = max(map(len, head))
    lines = []
    for name, *cells in rows:
        lines.append(name)
        known = [(x, y) for x, y in zip(head[1:], cells, strict=True) if y]
        lines += [f"  {x.ljust(label)}  {y}" for x, y in known]
    return "\n".join(lines)
