"""A run of the suite on the terminal: a bar while it lasts, a table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attn_dispatch.conformance.outcome import Outcome
from attn_dispatch.conformance.report import (
    STATUSES,
    Report,
    count,
    families,
    gradient_reasons_of,
    reasons_of,
)
from attn_dispatch.terminal.progress import progress
from attn_dispatch.terminal.text import wrapped

_PLAIN_EVERY = 25
_MOST_REASONS = 12


def watched(outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    """The same outcomes, shown as they come: a bar, or a line for some where there is none."""
    seen: list[Outcome] = []
    with progress("Cases", total, every=_PLAIN_EVERY) as shown:
        for outcome in outcomes:
            seen.append(outcome)
            if outcome.status in ("failed", "crashed"):
                shown.say(_bad(outcome), is_bad=True)
            shown.step(_counted(seen))
            yield outcome


def _bad(outcome: Outcome) -> str:
    said = (outcome.failures[0].splitlines() or [""])[0]
    return f"{outcome.status}: {outcome.case}: {said}"


def _counted(outcomes: list[Outcome]) -> str:
    return ", ".join(f"{n} {status}" for status, n in count(outcomes).items() if n)


def show(report: Report) -> None:
    """The outcomes by family, and the reasons of those refused."""
    rows = [
        [x.name, *(str(x.counts[status] or "") for status in STATUSES), f"{x.worst:.2f}"]
        for x in families(report.outcomes)
    ]
    worst = max((x.used for x in report.outcomes), default=0)
    totals = ["all", *(str(n or "") for n in report.counts().values()), f"{worst:.2f}"]
    print(f"\n{report.implementation} on {report.environment['device']}\n")
    print(_table([["family", *STATUSES, "worst"], *rows, totals]))
    print("\nworst: the largest share of the allowed error; above 1 is wrong")
    for title, reasons in (
        ("Refused, and why", reasons_of(report.outcomes)),
        ("Gradients left to XLA, and why", gradient_reasons_of(report.outcomes)),
    ):
        if reasons:
            print(f"\n{title}:")
        for reason, n in reasons[:_MOST_REASONS]:
            print("\n".join(wrapped(f"  {n:4} cases: ", reason)))
        if len(reasons) > _MOST_REASONS:
            print(f"  and {len(reasons) - _MOST_REASONS} more, all in the report")


def _table(rows: list[list[str]]) -> str:
    """The first row is the head, the last one the sum; the first column is text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [name.ljust(widths[0])]
        cells += [x.rjust(width) for x, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])
