"""The options that all benchmarks share."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from attn_dispatch_tools.reports.environment import file_name


def arguments(description: str, *, rounds: int, seconds: float) -> argparse.Namespace:
    """rounds, seconds (the length of one measurement) and results (a folder or None)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=seconds, help="length of one measurement")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON")
    return parser.parse_args()


def save(kind: str, report: dict[str, Any], folder: pathlib.Path | None) -> None:
    """Writes a report, whose "environment" names the file; nothing without a folder."""
    if folder is not None:
        path = folder / f"{file_name(kind, report['environment'])}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
