"""The display of a run of the suite on the terminal: a progress bar, then a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attn_dispatch_tools.terminal import style
from attn_dispatch_tools.terminal.progress import progress
from attn_dispatch_tools.terminal.text import wrapped
from attn_dispatch_tools.verify.outcome import Outcome
from attn_dispatch_tools.verify.report import (
    STATUSES,
    Report,
    count,
    families,
    gradient_reasons_of,
    reasons_of,
)

_PLAIN_EVERY = 25
_MAX_REASONS = 12


def watched(outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    """Yield each outcome, and show the progress on a bar or, without one, in lines."""
    seen: list[Outcome] = []
    with progress("Cases", total, every=_PLAIN_EVERY) as shown:
        for outcome in outcomes:
            seen.append(outcome)
            if outcome.status in ("failed", "crashed"):
                shown.print_line(_bad(outcome), is_bad=True)
            shown.step(_counted(seen))
            yield outcome


def _bad(outcome: Outcome) -> str:
    first_line = (outcome.failures[0].splitlines() or [""])[0]
    return f"{outcome.status}: {outcome.case}: {first_line}"


def _counted(outcomes: list[Outcome]) -> str:
    return ", ".join(f"{n} {status}" for status, n in count(outcomes).items() if n)


def show(report: Report) -> None:
    """Print the outcomes by family, and the reasons why cases were refused."""
    rows = [
        [x.name, *(str(x.counts[status] or "") for status in STATUSES), f"{x.worst:.2f}"]
        for x in families(report.outcomes)
    ]
    worst = max((x.used for x in report.outcomes), default=0)
    totals = ["all", *(str(n or "") for n in report.counts().values()), f"{worst:.2f}"]
    lines = ["", f"{report.implementation} on {report.environment['device']}", ""]
    lines += [style.table(["family", *STATUSES, "worst"], [*rows, totals], has_sum=True), ""]
    lines += wrapped("", "worst: the largest share of the allowed error; above 1 is wrong")
    for title, reasons in (
        ("Refused, and why", reasons_of(report.outcomes)),
        ("Gradients left to XLA, and why", gradient_reasons_of(report.outcomes)),
    ):
        if reasons:
            lines += ["", f"{title}:"]
        for reason, n in reasons[:_MAX_REASONS]:
            lines += wrapped(f"  {n:4} cases: ", reason)
        if len(reasons) > _MAX_REASONS:
            lines.append(f"  and {len(reasons) - _MAX_REASONS} more, all in the report")
    is_bad = any(x.status in ("failed", "crashed") for x in report.outcomes)
    style.show("\n".join(lines), _MARKS | {r"(?m)^all .*": style.BAD if is_bad else style.GOOD})


_MARKS = {
    r"(?m)^(?:family .*|.* on .*|.*, and why:)$": style.HEADING,
    r"(?m)^ +\d+ cases:": style.NOT,
    style.RULE: style.QUIET,
}
