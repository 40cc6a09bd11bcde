"""Writes the table of docs/features.md of what runs on each GPU, from real plans and real rules.

usage: python -m tests.scripts.support_table

It also writes each cuDNN's refusals to tests/cudnn/planned, which test_planning.py compares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from attn_dispatch import aiter
from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.call import call_for
from attn_dispatch.aiter.kernels import kernel_for
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import parse
from tests.scripts.plan_matrix import INSTALLED, Matrix, Planning
from tests.support.page_tables import with_table
from tests.support.plan_cases import ARCHS, CASES, SECTIONS
from tests.support.repository import DOCS, TESTS

DOCUMENT = DOCS / "features.md"
DIRECTIONS = {"F": "forward", "B": "backward"}
REFUSALS = TESTS / "cudnn" / "planned"
AMD = {
    f"{x} {y}": parse(f"{x}:aiter{y}") for y in ("0.1.7", "0.1.20") for x in ("gfx942", "gfx950")
}
"""The columns of AMD GPUs, by architecture and the version of AITER."""


def refusals(matrix: Matrix) -> dict[str, dict[str, dict[str, str]]]:
    """What is not planned, by the label of the call, then direction and arch: rules, sentences."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for (label, direction, arch), cell in matrix.cells.items():
        if why := cell.sentences | ({"crash": cell.crash} if cell.crash else {}):
            found.setdefault(label, {})[f"{direction} {arch}"] = why
    return found


def table(matrix: Matrix) -> list[str]:
    """The lines of the table, with a row before the calls of each section."""
    columns = [*ARCHS, *AMD]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for section, calls in SECTIONS.items():
        lines.append(f"| **{section}** |{' |' * len(columns)}")
        for label in calls:
            cells = [_cell(matrix, label, arch) for arch in ARCHS]
            cells += [_amd_cell(label, device) for device in AMD.values()]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def _cell(matrix: Matrix, label: str, arch: str) -> str:
    """The letters of the directions that cuDNN plans."""
    return _letters(
        "" if matrix.cells[label, x, arch].sentences else letter for letter, x in DIRECTIONS.items()
    )


def _amd_cell(label: str, device: Device) -> str:
    """The letters of the directions that AITER runs, in bold where ASM does."""
    (release,), letters = aiter_folder.releases_for(device), list[str]()
    for letter, direction in DIRECTIONS.items():
        spec = CASES[label].spec(direction)
        if not aiter.not_supported_reasons(spec, device):
            call = call_for(spec, device.arch, release)
            by_asm = not kernel_for(call, device.arch, release).why_not_asm
            letters.append(f"**{letter}**" if by_asm else letter)
    return _letters(letters)


def _letters(letters: Iterable[str]) -> str:
    return " ".join(filter(None, letters)) or "-"


def main() -> None:
    others = os.environ.get("ATTN_DISPATCH_TEST_CUDNN", "").split(os.pathsep)
    planning = [Planning(library) for library in (INSTALLED, *filter(None, others))]
    matrices = [x.matrix() for x in planning]
    REFUSALS.mkdir(exist_ok=True)
    for matrix in matrices:
        path = REFUSALS / f"cudnn-{matrix.version_text}.json"
        path.write_text(json.dumps(refusals(matrix), indent=1) + "\n")
    DOCUMENT.write_text(with_table(DOCUMENT, "support_table", table(matrices[0])))


if __name__ == "__main__":
    main()
