"""A run of the suite on the terminal: a bar while it lasts, a table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from attn_dispatch.conformance.outcome import Outcome
from attn_dispatch.conformance.report import (
    STATUSES,
    Report,
    count,
    families,
    gradient_reasons_of,
    reasons_of,
)

_PLAIN_EVERY = 25
_MOST_REASONS = 12


def watched(outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    """The same outcomes, shown as they come: a bar, or a line for some where no terminal is."""
    console = Console(highlight=False)
    if not console.is_terminal:
        yield from _plainly(outcomes, total)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[counts]}"),
        console=console,
    ) as progress:
        task = progress.add_task("Cases", total=total, counts="")
        seen: list[Outcome] = []
        for outcome in outcomes:
            seen.append(outcome)
            if outcome.status in ("failed", "crashed"):
                console.print(escape(_bad(outcome)), style="red")
            progress.update(task, advance=1, counts=_counted(seen))
            yield outcome


def _plainly(outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    seen: list[Outcome] = []
    for outcome in outcomes:
        seen.append(outcome)
        if outcome.status in ("failed", "crashed"):
            print(_bad(outcome), flush=True)
        if len(seen) % _PLAIN_EVERY == 0 or len(seen) == total:
            print(f"{len(seen)} of {total}: {_counted(seen)}", flush=True)
        yield outcome


def _bad(outcome: Outcome) -> str:
    said = (outcome.failures[0].splitlines() or [""])[0]
    return f"{outcome.status}: {outcome.case}: {said}"


def _counted(outcomes: list[Outcome]) -> str:
    return ", ".join(f"{n} {status}" for status, n in count(outcomes).items() if n)


def show(report: Report) -> None:
    """The outcomes by family, and the reasons of those refused."""
    console = Console(highlight=False)
    table = Table(title=f"{report.implementation} on {report.environment['device']}")
    table.add_column("family")
    for status in STATUSES:
        table.add_column(status, justify="right")
    table.add_column("worst", justify="right")
    for family in families(report.outcomes):
        shown = [str(family.counts[status] or "") for status in STATUSES]
        table.add_row(family.name, *shown, f"{family.worst:.2f}")
    totals = [str(n or "") for n in report.counts().values()]
    table.add_section()
    table.add_row("all", *totals, f"{max((x.used for x in report.outcomes), default=0):.2f}")
    console.print(table)
    console.print("worst: the largest share of the allowed error; above 1 is wrong")
    for title, reasons in (
        ("Refused, and why", reasons_of(report.outcomes)),
        ("Gradients left to XLA, and why", gradient_reasons_of(report.outcomes)),
    ):
        if reasons:
            console.print(f"\n{title}:")
        for reason, n in reasons[:_MOST_REASONS]:
            console.print(f"  {n:4} cases: {reason}", markup=False)
        if len(reasons) > _MOST_REASONS:
            console.print(f"  and {len(reasons) - _MOST_REASONS} more, all in the report")
