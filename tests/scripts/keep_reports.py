"""Shortens reports of runs on GPUs, to keep them in tests/gpu/results.

usage: python -m tests.scripts.keep_reports FOLDER    the folder of tests/gpu/prove.py's reports

A kept report of `attn-dispatch verify` has the environment, the options, counts, the commonest
reasons and rewrites with their counts, and everything about each case that failed or crashed. Other
outcomes are
left out: at the commit of the report, the seed draws the same calls again. Reasons, rewrites and
kernels are kept of the newest report of its kind only. `attn-dispatch verify`
reads kept reports with --repeat; --plot needs the full one. Other JSON files are copied as they
are.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_dispatch_tools.verify import report
from attn_dispatch_tools.verify.report import Report
from tests.support.repository import TESTS

RESULTS = TESTS / "gpu/results"

_COMMONEST = 12
"""So many reasons, rewrites and kernels are kept by name; the others are counted together."""

_REASONS = ("refused", "gradients_left_to_xla", "rewrites", "kernels")
"""Fields of a short report that only the newest one of its kind has."""


def kept(full: Report) -> dict[str, Any]:
    """The short form of a full report, as JSON values."""
    facts = full.to_json()
    del facts["outcomes"]
    families = {
        x.name: x.counts | {"worst": _share(x.worst)} for x in report.families(full.outcomes)
    }
    kernels = Counter(f"{way}: {x}" for y in full.outcomes for way, x in y.engines.items())
    return facts | {
        "families": families,
        "refused": commonest(dict(report.reasons_of(full.outcomes))),
        "gradients_left_to_xla": commonest(dict(report.gradient_reasons_of(full.outcomes))),
        "rewrites": commonest(dict(report.rewrites_of(full.outcomes))),
        "kernels": commonest(kernels),
        "outcomes": [x.to_json() for x in full.bad],
    }


def commonest(counts: Mapping[str, int]) -> dict[str, int]:
    """The largest counts, and the sum of the others with how many these are."""
    ordered = sorted(counts.items(), key=lambda x: -x[1])
    rest = ordered[_COMMONEST:]
    others = {f"{len(rest)} others": sum(count for _, count in rest)} if rest else {}
    return dict(ordered[:_COMMONEST]) | others


def kind(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """What ran and how: reports of one kind differ in their day, commit, seed and size."""
    environment, options = facts["environment"], facts["options"]
    where = (str(environment.get(x, "")) for x in ("device", "cudnn"))
    how = (str(bool(options.get(x))) for x in ("serving", "each_rewrite", "tuned"))
    return (facts["implementation"], *where, *how)


def shorten_older(results: Path) -> None:
    """Leave reasons, rewrites and kernels in the newest report of each kind only."""
    found = {x: json.loads(x.read_text()) for x in results.glob("verify-*.json")}
    by_date = sorted(found, key=lambda x: found[x]["environment"].get("date", ""))
    newest = {kind(found[x]): x for x in by_date}
    for path, facts in found.items():
        if path not in newest.values() and facts.keys() & set(_REASONS):
            counts = {name: x for name, x in facts.items() if name not in _REASONS}
            path.write_text(json.dumps(counts, separators=(",", ":")) + "\n")


def is_kept(facts: dict[str, Any]) -> bool:
    """Whether a report, read as JSON, is in its short form."""
    return "families" in facts


def _share(worst: float) -> float | str:
    # JSON has no infinity, which is the share if a result is NaN.
    return round(worst, 4) if math.isfinite(worst) else str(worst)


def keep(folder: Path, results: Path = RESULTS) -> None:
    """Copy every JSON file of the folder into the results, full reports in their short form.

    Older reports of the same kind are shortened further.
    """
    for path in sorted(folder.glob("*.json")):
        text = path.read_text()
        if path.name.startswith("verify-") and not is_kept(json.loads(text)):
            text = json.dumps(kept(report.read(path))) + "\n"
        (results / path.name).write_text(text)
    shorten_older(results)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    keep(Path(sys.argv[1]))
