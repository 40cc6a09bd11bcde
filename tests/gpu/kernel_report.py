"""The report of checks and times of FlashAttention-4's kernels, short enough to be kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_dispatch_tools.reports.environment import environment, file_name

Times = Mapping[str, Mapping[str, float]]


def write(
    folder: Path, prefix: str, versions: str, rows: Sequence[Mapping[str, Any]], times: Times
) -> None:
    """Write the counts of checks, the wrong ones completely, and times in microseconds.

    Args:
      folder: where the file is written.
      prefix: the beginning of its name.
      versions: those of the kernels.
      rows: the checks. Each has "case", which begins with the set's name, "result", "error",
        "allowed" and "right".
      times: by call and then by what runs it.
    """
    facts = environment()
    sets: dict[str, dict[str, Any]] = {}
    for row in rows:
        found = sets.setdefault(str(row["case"]).split()[0], {"checks": 0, "worst": {}})
        found["checks"] += 1
        share = row["error"] / row["allowed"] if row["allowed"] else float(row["error"] > 0)
        worst = max(found["worst"].get(row["result"], 0.0), share)
        found["worst"][row["result"]] = round(worst, 3)
    report = {
        "environment": facts,
        "versions": versions,
        "checks": len(rows),
        "wrong": [row for row in rows if not row["right"]],
        "sets": sets,
        "times_us": {x: {y: round(t, 1) for y, t in named.items()} for x, named in times.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_name(prefix, facts)}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
