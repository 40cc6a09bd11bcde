"""The command-line options that benchmarks share, and the files that they write."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from attn_dispatch_tools.reports.environment import file_name


def arguments(description: str, *, rounds: int, seconds: float) -> argparse.Namespace:
    """The options: rounds, seconds (the length of one measurement) and out (a folder or None).

    Args:
      description: what the benchmark measures, for --help.
      rounds, seconds: the defaults.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=seconds, help="length of one measurement")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON")
    return parser.parse_args()


def save(kind: str, report: dict[str, Any], folder: pathlib.Path | None) -> None:
    """Write a report into the folder, if there is one. Its "environment" is part of the name."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file_name(kind, report['environment'])}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
