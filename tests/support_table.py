"""Writes docs/support.md: what runs where, from real plans and real rules.

usage: PYTHONPATH=tests python tests/support_table.py

It also keeps what each cuDNN refuses in tests/planned, for test_planning.py to compare with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from attn_dispatch import aiter, xla
from attn_dispatch.devices.target import parse
from plan_cases import ARCHS, CASES, SECTIONS
from plan_matrix import INSTALLED, Matrix, Planning

DOCUMENT = Path(__file__).parents[1] / "docs" / "support.md"
REFUSALS = Path(__file__).with_name("planned")
AMD = ("gfx942", "gfx950")

_TITLE = "# What runs where"
_INTRO = """\
Made by tests/support_table.py, which asks the real rules and has the real cuDNN {version} plan
every call below, without a GPU: `make test` compares this page with what it says now. `F` and `B`
say that the forward and the backward pass run there, a number why not. The backward pass is of
every gradient there is, unless the row says otherwise; where it is refused, XLA differentiates what
cuDNN computed.

This is what kernels run as they are. Under `attn_dispatch.rewrites()` much of what they refuse runs
rewritten (design.md, Rewrites): `explain` says by which, and tests/refusals.py counts what is left.

Calls are bfloat16 and have 8 query heads, 2 kv heads and head dim 64, if the row does not say
otherwise; segment ids and cu_seqlens are on 32,768 tokens, with 2 query heads and 1 kv head. sm80
is an A100, sm90 an H100 or H200, sm100 a B200, sm120 an RTX 5090. Only an H200 and an H100 have
run any of it, and no AMD GPU has.
"""


def refusals(matrix: Matrix) -> dict[str, dict[str, list[str]]]:
    """What is not planned: direction and arch, the reasons, by the label of the call."""
    found: dict[str, dict[str, list[str]]] = {}
    for (label, direction, arch), cell in matrix.cells.items():
        if why := [*cell.reasons, *([cell.crash] if cell.crash else [])]:
            found.setdefault(label, {})[f"{direction} {arch}"] = why
    return found


def document(matrix: Matrix) -> str:
    """The page."""
    notes: dict[str, int] = {}
    lines = [_TITLE, "", _INTRO.format(version=matrix.version_text)]
    for section, calls in SECTIONS.items():
        lines += [f"## {section}", ""]
        lines += ["| | " + " | ".join([*ARCHS, *AMD, "XLA"]) + " |"]
        lines += ["|---" * (len(ARCHS) + len(AMD) + 2) + "|"]
        for label in calls:
            cells = [_cell(matrix, label, arch, notes) for arch in ARCHS]
            cells += [_asked(label, arch, notes) for arch in (*AMD, "xla")]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["## Why not", "", *(f"{number}. {reason}" for reason, number in notes.items()), ""]
    return "\n".join(lines)


def _cell(matrix: Matrix, label: str, arch: str, notes: dict[str, int]) -> str:
    reasons = [matrix.cells[label, x, arch].reasons for x in ("forward", "backward")]
    return _said(reasons, notes)


def _asked(label: str, arch: str, notes: dict[str, int]) -> str:
    """AITER or XLA, which need no plan."""
    module, device = (xla, parse("sm90")) if arch == "xla" else (aiter, parse(arch))
    specs = (CASES[label].spec(x) for x in ("forward", "backward"))
    return _said([module.not_supported_reasons(spec, device) for spec in specs], notes)


def _said(reasons: list[tuple[str, ...]], notes: dict[str, int]) -> str:
    return " ".join(_letters(reasons, notes))


def _letters(reasons: list[tuple[str, ...]], notes: dict[str, int]) -> Iterator[str]:
    for letter, why in zip("FB", reasons, strict=True):
        numbers = [notes.setdefault(reason, len(notes) + 1) for reason in why]
        yield letter if not why else f"~~{letter}~~ " + ",".join(map(str, numbers))


def main() -> None:
    others = os.environ.get("ATTN_DISPATCH_TEST_CUDNN", "").split(os.pathsep)
    planning = [Planning(library) for library in (INSTALLED, *filter(None, others))]
    matrices = [x.matrix() for x in planning]
    REFUSALS.mkdir(exist_ok=True)
    for matrix in matrices:
        path = REFUSALS / f"cudnn-{matrix.version_text}.json"
        path.write_text(json.dumps(refusals(matrix), indent=1) + "\n")
    DOCUMENT.write_text(document(matrices[0]))


if __name__ == "__main__":
    main()
