"""The table of docs/proof.md: every report of `attn-dispatch verify` in tests/gpu/results.

usage: python tests/reports_table.py    writes it into the page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
RESULTS = _ROOT / "tests/gpu/results"
PAGE = _ROOT / "docs/proof.md"
_BEFORE, _AFTER = "<!-- reports -->\n", "<!-- end of reports -->\n"


_AND_NAMED = {"": "", "found/*": "", "cache/*": ", and named ones of serving"}


def _row(name: str, report: dict[str, Any]) -> list[str]:
    facts, options, counts = report["environment"], report["options"], report["counts"]
    kind = "each rewritten" if options.get("each_rewrite") else "as they come"
    if options.get("tuned"):
        kind += ", each tuned first"
    if options.get("serving"):
        kind = "of serving"
    others = ", and some named ones" if "," in options["cases"] else ", and all named cases"
    kind += _AND_NAMED.get(options["cases"], others)
    return [
        facts["date"][:10],
        facts["commit"][:7],
        facts["cudnn"] if report["implementation"] == "cudnn" else report["implementation"],
        f"[{options['seed']}](../tests/gpu/results/{name})",
        f"{options['random']}, {kind}",
        *(str(counts.get(status, 0)) for status in ("passed", "refused", "failed", "crashed")),
    ]


def table() -> str:
    """One row for each report, the newest first."""
    head = ["date", "commit", "of", "seed", "drawn", "passed", "refused", "failed", "crashed"]
    reports = RESULTS.glob("verify-*.json")
    rows = [_row(x.with_suffix(".md").name, json.loads(x.read_text())) for x in reports]
    rows.sort(key=lambda row: (row[0], row[3]), reverse=True)
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, ["---"] * len(head), *rows))


def page(text: str) -> str:
    """The page with today's table in it."""
    before, _, rest = text.partition(_BEFORE)
    return before + _BEFORE + table() + _AFTER + rest.partition(_AFTER)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
