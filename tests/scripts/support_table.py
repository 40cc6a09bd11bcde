"""Writes docs/support.md, the calls that run on each GPU, from real plans and real rules.

usage: python -m tests.scripts.support_table

It also writes each cuDNN's refusals to tests/cudnn/planned, which test_planning.py compares.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

from attn_dispatch import aiter, xla
from attn_dispatch.devices.target import parse
from tests.scripts.plan_matrix import INSTALLED, Matrix, Planning
from tests.support.plan_cases import ARCHS, CASES, SECTIONS
from tests.support.repository import DOCS, TESTS

DOCUMENT = DOCS / "support.md"
REFUSALS = TESTS / "cudnn" / "planned"
AMD = ("gfx942", "gfx950")

_WHY_NOT = """\
Each reason, and what helps: the rewrite by which the call runs, or what would be needed."""
_TITLE = "# Every option and reason"
_INTRO = """\
The calls that kernels run without rewrites. `F` stands for the forward pass and `B` for the
backward pass. A letter that is struck out does not run there; the number after it is that of the
reason, at the end of the page. The backward pass computes all gradients, unless the row says
otherwise. If it does not run, XLA differentiates the results of the forward pass.

Many of the other calls run rewritten ([design.md](design.md#rewrites)): `explain` names the
rewrites, and tests/scripts/refusals.py counts the calls that are left.

tests/scripts/support_table.py writes this page. It applies the real rules and has the real cuDNN
{version} plan every call below, without a GPU. `make test` checks that the page is up to date.

Calls are bfloat16 and have 8 query heads, 2 kv heads and head dim 64, unless the row says
otherwise; segment ids and cu_seqlens are on 32,768 tokens, with 2 query heads and 1 kv head. sm80
is an A100, sm90 an H100 or H200, sm100 a B200, sm120 an RTX 5090. Only an H200 and an H100 have run
any of these calls, and no AMD GPU has.
"""


_REWRITTEN = "*rewritten*: "
_TAKES = "*would take* "
_AS_MASK = _REWRITTEN + "as a mask over pairs of queries and keys, up to 2^27 of them"
_OTHER_DIMS = (
    _REWRITTEN
    + "zeros up to a head dim that a kernel has, or calls for some of the value dims each"
)
_SCORE_PROGRAM = _TAKES + "score functions traced to the vendor's own terms"
_ANSWERS = (
    (
        r"needs float16 or bfloat16",
        _TAKES + "kernels for other dtypes; the vendors have none",
    ),
    (r"hidden_dim.* when d_qk != d_v", _OTHER_DIMS),
    (
        r"hidden_dim.* 128 .* of 8 \(",
        _TAKES + "a kernel for wide heads: cuDNN has none here. What the dims past 128 add to a "
        "score could go in as a bias, which is an array [B, N, T, S] of float32",
    ),
    (r"hidden_dim", _OTHER_DIMS),
    (r"head dims up to 256", _OTHER_DIMS),
    (
        r"Packed/ragged LSE",
        _REWRITTEN + "as a padded batch of the sequences, where that has no more "
        "pairs than the packed rows: pass max_segment_len, or cu_seqlens; else as a mask",
    ),
    (r"segment ids: pass max_segments", _AS_MASK),
    (
        r"bias: AITER needs query's dtype",
        _REWRITTEN + "in 16 bits where that changes no number, else by XLA, decided when it runs",
    ),
    (
        r"bias that is the same for all keys",
        _REWRITTEN + "the gradient follows from lse, delta and sinks",
    ),
    (r"bias with packed sequences or lengths", _AS_MASK),
    (r"bottom-right mask together", _AS_MASK),
    (r"counts a bias or mask from the start", _AS_MASK),
    (r"counts them in 32 bits", _TAKES + "a call for some of the batch rows at a time"),
    (
        r"gradient of a bias under a soft cap",
        _REWRITTEN + "that gradient by XLA, beside the kernel",
    ),
    (r"logits_soft_cap together with bias", _TAKES + "instances of CK's kernel that have both"),
    (
        r"the gradient under logits_soft_cap",
        _TAKES + "a backward kernel with a soft cap: CK has none",
    ),
    (r"^mask: not run", _REWRITTEN + "as a bias of 0 and -inf"),
    (r"gradient of alibi_slopes", _REWRITTEN + "that gradient by XLA, beside the kernel"),
    (
        r"alibi_slopes: cuDNN",
        _REWRITTEN + "as a float32 bias over pairs of queries and keys, up to 2^27 of them",
    ),
    (r"Backward activations", _SCORE_PROGRAM),
    (r"^sinks: |^sinks beside", _REWRITTEN + "put into out and lse afterwards"),
    (
        r"dropout keep mask as a result|does not return the dropout mask",
        _REWRITTEN + "read from the kernel's output for known values",
    ),
    (r"dropout: cuDNN has one key|several dropout keys", _REWRITTEN + "a call for each key"),
    (r"the row maximum", _REWRITTEN + "by XLA, beside the kernel"),
    (
        r"deterministic_backward|Deterministic algorithm|that CK addresses at once",
        _TAKES + "a deterministic kernel there that sums in less memory",
    ),
    (r"^mask_mod|broadcasted vectors|arrays by row", _AS_MASK),
    (
        r"score_mod: .*(by s, which|depends on both t and s|as large as the scores)",
        _REWRITTEN + "what it adds to the score, as a bias over pairs, up to 2^27 of them",
    ),
    (
        r"score_mod: not run",
        _REWRITTEN + "as a soft cap, ALiBi or a bias over pairs, where it is one of them",
    ),
)
"""Patterns of reasons, each with what helps. The first that matches counts."""


def _answer(reason: str) -> str:
    """The rewrite that helps against a reason, or what the call would need."""
    return next(answer for pattern, answer in _ANSWERS if re.search(pattern, reason))


def refusals(matrix: Matrix) -> dict[str, dict[str, list[str]]]:
    """The reasons of what is not planned, by the label of the call, then direction and arch."""
    found: dict[str, dict[str, list[str]]] = {}
    for (label, direction, arch), cell in matrix.cells.items():
        if why := [*cell.reasons, *([cell.crash] if cell.crash else [])]:
            found.setdefault(label, {})[f"{direction} {arch}"] = why
    return found


def document(matrix: Matrix) -> str:
    """The text of the page."""
    notes: dict[str, int] = {}
    lines = [_TITLE, "", _INTRO.format(version=matrix.version_text)]
    for section, calls in SECTIONS.items():
        lines += [f"## {section}", ""]
        lines += ["| | " + " | ".join([*ARCHS, *AMD, "XLA"]) + " |"]
        lines += ["|---" * (len(ARCHS) + len(AMD) + 2) + "|"]
        for label in calls:
            cells = [_cell(matrix, label, arch, notes) for arch in ARCHS]
            cells += [_unplanned_cell(label, arch, notes) for arch in (*AMD, "xla")]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["## Why not", "", _WHY_NOT, ""]
    lines += [*(f"{number}. {reason}. {_answer(reason)}" for reason, number in notes.items()), ""]
    return "\n".join(lines)


def _cell(matrix: Matrix, label: str, arch: str, notes: dict[str, int]) -> str:
    reasons = [matrix.cells[label, x, arch].reasons for x in ("forward", "backward")]
    return _text(reasons, notes)


def _unplanned_cell(label: str, arch: str, notes: dict[str, int]) -> str:
    """The cell of AITER or XLA, which need no plan."""
    module, device = (xla, parse("sm90")) if arch == "xla" else (aiter, parse(arch))
    specs = (CASES[label].spec(x) for x in ("forward", "backward"))
    return _text(
        [tuple(map(str, module.not_supported_reasons(spec, device))) for spec in specs], notes
    )


def _text(reasons: list[tuple[str, ...]], notes: dict[str, int]) -> str:
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
