"""Writes the tables of docs/proof.md and a page docs/proof/VERSION.md for each version of cuDNN,
from the reports of `attn-dispatch verify` in tests/gpu/results.

usage: python -m tests.scripts.reports_table
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scripts.keep_reports import RESULTS
from tests.support.repository import DOCS

PAGE = DOCS / "proof.md"
FOLDER = DOCS / "proof"
_BEFORE, _AFTER = "<!-- reports -->\n", "<!-- end of reports -->\n"
_STATUSES = ("passed", "refused", "failed", "crashed")
_AND_NAMED = {"": "", "found/*": "", "cache/*": ", and named ones of serving"}


@dataclass(frozen=True)
class Kept:
    """One kept report."""

    name: str
    facts: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        return self.facts["environment"]

    @property
    def options(self) -> dict[str, Any]:
        return self.facts["options"]

    @property
    def version(self) -> str:
        """The release of cuDNN that ran, such as 9.19."""
        return self.environment["cudnn"].rpartition(".")[0]

    @property
    def device(self) -> str:
        return self.environment["device"].removeprefix("NVIDIA ").partition(" ")[0]

    @property
    def day(self) -> str:
        return self.environment["date"][:10]

    @property
    def commit(self) -> str:
        return self.environment["commit"][:7]

    @property
    def kind(self) -> str:
        """The kind of calls that the run drew."""
        if self.options.get("serving"):
            return "of serving"
        kind = "each rewritten" if self.options.get("each_rewrite") else "as they come"
        return kind + ", each tuned first" * bool(self.options.get("tuned"))

    @property
    def bad(self) -> int:
        counts = self.facts["counts"]
        return counts["failed"] + counts["crashed"]

    def link(self, up: str) -> str:
        """The seed as a link. `up` leads from the page to the repository's root."""
        return f"[{self.options['seed']}]({up}tests/gpu/results/{self.name})"


def reports() -> list[Kept]:
    """Every kept report, the newest first."""
    found = [Kept(x.name, json.loads(x.read_text())) for x in RESULTS.glob("verify-*.json")]
    return sorted(found, key=lambda x: (x.day, x.options["seed"]), reverse=True)


def _table(rows: Iterable[list[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def totals(kept: list[Kept]) -> str:
    """One row for each version of cuDNN, implementation, device and kind of drawn call."""

    def key(x: Kept) -> tuple[str, ...]:
        return x.version.rjust(8), x.facts["implementation"], x.device, x.kind

    head = ["cuDNN", "of", "device", "drawn", "runs", "dates", "commits", *_STATUSES[:2]]
    rows = [[*head, "failed or crashed"], ["---"] * (len(head) + 1)]
    for (_, *rest), group in itertools.groupby(sorted(kept, key=key), key):
        runs = sorted(group, key=lambda x: x.environment["date"])
        version = runs[0].version
        commits = list(dict.fromkeys(x.commit for x in runs))
        bad = [x for x in runs if x.bad]
        rows.append([
            f"[{version}](proof/{version}.md)", *rest, str(len(runs)),
            _from_to([x.day for x in runs]),
            _from_to(commits) + f" ({len(commits)})" * (len(commits) > 2),
            *(str(sum(x.facts["counts"][y] for x in runs)) for y in _STATUSES[:2]),
            str(sum(x.bad for x in bad)) + ": seed " * bool(bad)
            + ", ".join(x.link("../") for x in bad),
        ])  # fmt: skip
    return _table(rows)


def _from_to(values: list[str]) -> str:
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def details(version: str, kept: list[Kept]) -> str:
    """The page of one version of cuDNN: one row for each report."""
    head = ["date", "commit", "of", "device", "seed", "drawn", *_STATUSES]
    rows = [head, ["---"] * len(head), *map(_row, kept)]
    return f"""\
# Drawn calls with cuDNN {version}

Each run of `attn-dispatch verify` on a GPU beside cuDNN {version}, the newest first. What is drawn
and what failed: [What is proven](../proof.md#drawn-calls). A seed leads to the kept report:
environment, options, counts, and everything about each call that failed; the newest run of its kind
also has reasons, rewrites and kernels.

{_table(rows)}"""


def _row(x: Kept) -> list[str]:
    cases = x.options["cases"]
    others = ", and some named ones" if "," in cases else ", and all named cases"
    drawn = f"{x.options['random']}, {x.kind}{_AND_NAMED.get(cases, others)}"
    return [
        x.day, x.commit, x.facts["implementation"], x.device, x.link("../../"),
        drawn + ", cut off" * bool(x.options.get("interrupted")),
        *(str(x.facts["counts"][status]) for status in _STATUSES),
    ]  # fmt: skip


def pages(text: str) -> Iterator[tuple[Path, str]]:
    """Every page with its table, from the text of docs/proof.md."""
    kept = reports()
    before, _, rest = text.partition(_BEFORE)
    yield PAGE, before + _BEFORE + totals(kept) + _AFTER + rest.partition(_AFTER)[2]
    for version in {x.version for x in kept}:
        yield FOLDER / f"{version}.md", details(version, [x for x in kept if x.version == version])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages(PAGE.read_text()):
        path.write_text(text)
