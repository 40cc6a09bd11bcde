"""Writes the table of docs/integrations.md from the results of the tests.

usage: python -m tests.scripts.integrations_table [--print]

The script runs tests/integrations with the frameworks that are installed. A test records its result
as a property `cell`: (framework, column, text).
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import pytest

from tests.support.page_tables import with_table
from tests.support.repository import DOCS, TESTS

PAGE = DOCS / "integrations.md"

COLUMNS = (
    "plain", "mask", "causal", "dropout training step", "decode", "sow", "remat", "mesh",
)  # fmt: skip
PACKAGES = {
    "Flax NNX": "flax", "Flax Linen": "flax", "Equinox": "equinox", "Haiku": "dm-haiku",
    "Keras 3": "keras", "Penzai": "penzai",
}  # fmt: skip
ABSENT = {
    ("Equinox", "decode"), ("Haiku", "decode"), ("Keras 3", "decode"), ("Equinox", "sow"),
    ("Haiku", "sow"), ("Penzai", "sow"),
}  # fmt: skip
"""The columns that a framework's layer does not have."""


class Cells:
    """A pytest plugin that keeps the cells recorded by tests that passed."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], str] = {}
        self.failed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed += report.failed
        if report.when == "call" and report.passed:
            for name, cell in report.user_properties:
                if name == "cell":
                    framework, column, text = cell
                    self.found[framework, column] = text


def table(cells: Cells) -> list[str]:
    def cell(name: str, column: str) -> str:
        if text := cells.found.get((name, column)):
            return text
        return "has none" if (name, column) in ABSENT else "not run"

    def versioned(name: str) -> str:
        try:
            return f"{name} {importlib.metadata.version(PACKAGES[name])}"
        except importlib.metadata.PackageNotFoundError:
            return name

    jax_version = importlib.metadata.version("jax")
    lines = [
        "Each framework's layer and the same layer on our attention, with the same parameters,"
        f" on XLA with JAX {jax_version} on a CPU, in float32:",
        "values and all gradients within 1e-5; ten steps of SGD; decoding with a cache; how often"
        " a remat policy by the",
        'name "context" runs the attention; a batch sharded over four of eight devices. In bfloat16'
        " each lowers to cuDNN's",
        "kernels, forward and backward (sm90).",
        "",
        "| | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name in PACKAGES:
        lines.append("| " + " | ".join([versioned(name), *(cell(name, x) for x in COLUMNS)]) + " |")
    return lines


def main() -> int:
    cells = Cells()
    status = pytest.main(["-q", "-x", str(TESTS / "integrations")], plugins=[cells])
    if status or cells.failed:
        return 1
    if "--print" in sys.argv:
        print(*table(cells), sep="\n")
        return 0
    PAGE.write_text(with_table(PAGE, "integrations_table", table(cells)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
