"""Tables that scripts write into a page, each between two markers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

END = "<!-- end of table -->"


def with_table(page: Path, script: str, lines: Iterable[str]) -> str:
    """The text of a page with `lines` as the table that `python -m tests.scripts.SCRIPT` writes.

    Raises:
        ValueError: The page lacks the markers of this table.
    """
    begin = f"<!-- table: python -m tests.scripts.{script} -->"
    before, _, rest = page.read_text("utf-8").partition(begin)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"expected {begin!r} and {END!r} in {page}")
    return "\n".join([f"{before}{begin}", "", *lines, "", f"{END}{after}"])
