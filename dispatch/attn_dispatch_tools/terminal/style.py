"""The look of what commands print. On a terminal rich adds colours, but changes no text: it neither
wraps lines nor cuts cells."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attn_dispatch.console import console
from attn_dispatch_tools.terminal.text import width

Marks = dict[str, str]
"""The style of each match of a regular expression, or of its group if it has one."""

HEADING, GOOD, BAD, NOT, QUIET = "bold", "green", "bold red", "yellow", "dim"
"""The styles of headings; of what works; of what is wrong; of what cannot run, for a reason; and of
what matters less."""

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
    """The (start, end) of each match: of the pattern's first group if it has one, else of all."""
    return [x.span(1 if x.re.groups else 0) for x in re.finditer(pattern, text)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, has_sum: bool = False) -> str:
    """A table whose first column is text, aligned left, and whose others are numbers.

    If the table is wider than the terminal, each cell is on a line by itself.

    Args:
      head: the names of the columns.
      rows: the cells of each row.
      has_sum: whether the last row is the sum of the others, and set apart by a rule.
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
