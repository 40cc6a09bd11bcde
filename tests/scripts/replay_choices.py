"""Prints where core/preferences.json chooses an implementation that is not the best one.

usage: python -m tests.scripts.replay_choices FILE ...

The files are those of benchmarks/choices.py. A row of the table without which nothing is worse in
any of them is printed too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from attn_dispatch.core import preferences
from tests.support import choices_replay


def main(files: list[str]) -> None:
    reports = [choices_replay.read(Path(x)) for x in files]
    rows = preferences.rows()

    def found(rows: list[preferences.Row]) -> list[str]:
        return [
            f"without {', '.join(without) or 'nothing'}: {x}"
            for without in choices_replay.MISSING
            for report in reports
            for x in choices_replay.behind(report, rows, without)
        ]

    misses = found(rows)
    print(*misses, sep="\n")
    for i, row in enumerate(rows):
        if len(found(rows[:i] + rows[i + 1 :])) <= len(misses):
            print(f"without effect here: {json.dumps(row)}")


if __name__ == "__main__":
    main(sys.argv[1:])
