"""The report of a run of the suite, as JSON for programs and Markdown for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from attn_dispatch.files import reading, writing
from attn_dispatch.text import error_text
from attn_dispatch_tools.reports.environment import file_name
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import BY_NAME
from attn_dispatch_tools.verify.outcome import Outcome, Status

_MAX_BYTES = 2**27
STATUSES: tuple[Status, ...] = get_args(Status)
_EXPECTED = "expected the JSON file of a report of `attn-dispatch verify`"


@dataclass(frozen=True)
class Report:
    """One run: its environment, implementation and options, and every outcome."""

    environment: dict[str, Any]
    implementation: str
    options: dict[str, Any]
    """The options of the command."""
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether some cases passed, and none failed or crashed; refused cases do not count."""
        counts = self.counts()
        return counts["passed"] > 0 and counts["failed"] == counts["crashed"] == 0

    def counts(self) -> dict[str, int]:
        """The number of outcomes of each status."""
        return count(self.outcomes)

    @property
    def bad(self) -> tuple[Outcome, ...]:
        """The outcomes of cases that failed or crashed."""
        return tuple(x for x in self.outcomes if x.status in ("failed", "crashed"))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "environment": self.environment,
            "implementation": self.implementation,
            "options": self.options,
            "counts": self.counts(),
            "seconds": round(self.seconds, 1),
            "outcomes": [x.to_json() for x in self.outcomes],
        }

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write verify-IMPLEMENTATION-DEVICE[-CUDNN][-SEED][-each_rewrite][-tuned] (.json, .md)."""
        folder.mkdir(parents=True, exist_ok=True)
        name = file_name(f"verify-{self.implementation}", self.environment)
        if "seed" in self.options:
            name += f"-seed_{self.options['seed']}"
        if "each_rewrite" in self.options:
            name += "-each_rewrite"
        if "tuned" in self.options:
            name += "-tuned"
        paths = tuple(folder / f"{name}.{ending}" for ending in ("json", "md"))
        writing.replace(paths[0], _a_line_each(self.to_json()).encode())
        writing.replace(paths[1], self.markdown().encode())
        return paths[0], paths[1]

    def markdown(self) -> str:
        """Versions, the outcomes by family, every reason, and failures in full."""
        counts = ", ".join(f"{n} {status}" for status, n in self.counts().items())
        counts += ". Interrupted: others were not run" * ("interrupted" in self.options)
        lines = [
            f"# attn-dispatch verify: {self.implementation} on {self.environment['device']}",
            "",
            f"{len(self.outcomes)} cases in {self.seconds:.0f} s: {counts}.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in self.environment.items()),
            *(f"| {name} | {value} |" for name, value in self.options.items()),
            "",
            "A case passes if every result and gradient is off from a float64 reference by at most",
            "twice the error of the naive computation (in NumPy, in the same dtype; three times",
            "with a soft cap) plus 1e-5; docs/design.md has the further allowances. *Worst* is the",
            "largest share of the allowance.",
            "",
            "| family | " + " | ".join(STATUSES) + " | worst |",
            "|---|" + "---:|" * (len(STATUSES) + 1),
        ]
        for family in families(self.outcomes):
            shown = [str(family.counts[x]) for x in STATUSES]
            lines.append(f"| {family.name} | " + " | ".join(shown) + f" | {family.worst:.2f} |")
        for title, reasons in (
            ("Refused, and why", reasons_of(self.outcomes)),
            ("Gradients left to XLA, and why", gradient_reasons_of(self.outcomes)),
            ("Rewrites by which calls ran", rewrites_of(self.outcomes)),
        ):
            if reasons:
                lines += ["", f"## {title}", ""]
                lines += [f"- {n} cases: {reason}" for reason, n in reasons]
        if self.bad:
            lines += ["", "## Failures"]
        for outcome in self.bad:
            lines += ["", f"### {outcome.case}: {outcome.status}", ""]
            lines += ["```", *outcome.failures, "```"]
        return "\n".join(lines) + "\n"


def read(path: Path) -> Report:
    """A report that was written as JSON, with every outcome.

    Raises:
      ValueError: the file is no such report, or some of its outcomes were left out.
    """
    with _a_report(path):
        report, counts = _parsed(path)
        if report.counts() != counts:
            shown = f"{len(report.outcomes)} of {sum(counts.values())}"
            raise ValueError(f"{_EXPECTED} with every outcome, got {path} with {shown}")
        return report


def bad_cases(path: Path) -> list[Case]:
    """The cases that failed or crashed in a report that was written as JSON.

    Outcomes that passed or were refused may have been left out.

    Raises:
      ValueError: the file is no such report.
    """
    with _a_report(path):
        report, _ = _parsed(path)
        return [Case.from_json(x.call) if x.call else BY_NAME[x.case] for x in report.bad]


def _parsed(path: Path) -> tuple[Report, dict[str, int]]:
    """The report in a JSON file, and the number of outcomes of each status in the run."""
    data = reading.json_file(path, _MAX_BYTES)
    report = Report(
        environment=data["environment"],
        implementation=data["implementation"],
        options=data["options"],
        outcomes=tuple(Outcome.from_json(x) for x in data["outcomes"]),
        seconds=data["seconds"],
    )
    report.markdown()  # a report must be printable
    return report, data["counts"]


@contextmanager
def _a_report(path: Path) -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        if isinstance(error, ValueError) and str(error).startswith(_EXPECTED):
            raise
        if isinstance(error, OSError):
            raise ValueError(f"{_EXPECTED}; {error_text(error)}") from error
        raise ValueError(f"{_EXPECTED}, got {path} ({type(error).__name__}: {error})") from error


def _a_line_each(report: dict[str, Any]) -> str:
    """The report as JSON, with each outcome on one line."""
    outcomes = ",\n".join(f"  {json.dumps(x)}" for x in report["outcomes"])
    head = json.dumps({name: x for name, x in report.items() if name != "outcomes"}, indent=1)
    return f'{head.removesuffix("}").rstrip()},\n "outcomes": [\n{outcomes}\n ]\n}}\n'


@dataclass(frozen=True)
class Family:
    """The outcomes of one family of cases."""

    name: str
    counts: dict[str, int]
    worst: float
    """The largest ratio of an error to its allowance."""


def families(outcomes: Iterable[Outcome]) -> list[Family]:
    """The families in the order in which they begin."""
    grouped: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.family, []).append(outcome)
    return [Family(x, count(y), max(z.used for z in y)) for x, y in grouped.items()]


def count(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """The number of outcomes of each status."""
    found = Counter(x.status for x in outcomes)
    return {status: found[status] for status in STATUSES}


def reasons_of(outcomes: Iterable[Outcome]) -> list[tuple[str, int]]:
    """The rules for which cases were refused, as the first sentence of each, with counts; most
    frequent first."""
    return _by_rule(
        found for x in outcomes for found in zip(x.rules or x.reasons, x.reasons, strict=True)
    )


def rewrites_of(outcomes: Iterable[Outcome]) -> list[tuple[str, int]]:
    """The rewrites by which cases ran, with counts; most frequent first."""
    return Counter(rewrite for x in outcomes for rewrite in x.rewrites).most_common()


def gradient_reasons_of(outcomes: Iterable[Outcome]) -> list[tuple[str, int]]:
    """The rules for which XLA had to compute gradients, in the form of `reasons_of`."""
    return _by_rule(
        (f"{names}: {rule}", f"{names}: {sentence}")
        for x in outcomes
        for names, why in x.refused_gradients.items()
        for rule, sentence in zip(x.gradient_rules.get(names, why), why, strict=True)
    )


def _by_rule(found: Iterable[tuple[str, str]]) -> list[tuple[str, int]]:
    """The first sentence of each rule, with counts, from pairs of rule and sentence."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for rule, sentence in found:
        first.setdefault(rule, sentence)
        counts[rule] += 1
    return [(first[rule], n) for rule, n in counts.most_common()]
