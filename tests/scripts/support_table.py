"""Writes docs/support.md, the calls that run on each GPU, from real plans and real rules.

usage: python -m tests.scripts.support_table

It also writes each cuDNN's refusals to tests/cudnn/planned, which test_planning.py compares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from attn_dispatch import aiter, xla
from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.call import call_for
from attn_dispatch.aiter.kernels import NO_CK, kernel_for
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.target import parse
from tests.scripts.plan_matrix import INSTALLED, Matrix, Planning
from tests.support.plan_cases import ARCHS, CASES, SECTIONS
from tests.support.repository import DOCS, TESTS

DOCUMENT = DOCS / "support.md"
REFUSALS = TESTS / "cudnn" / "planned"
AMD = {
    f"{x} {y}": parse(f"{x}:aiter{y}") for y in ("0.1.7", "0.1.20") for x in ("gfx942", "gfx950")
}
"""The columns of AMD GPUs, by architecture and the version of AITER."""

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

The columns of AMD GPUs name the version of AITER. **F** and **B** are its ASM kernels, F and B are
CK's, with the numbers of the reasons against ASM. Of AITER 0.1.15 and later ASM kernels alone are
built, so that CK's calls are XLA's there.
"""


_REWRITTEN = "*rewritten*: "
_TAKES = "*would take* "
_AS_MASK = _REWRITTEN + "as a mask over pairs of queries and keys, up to 2^27 of them"
_OTHER_DIMS = (
    _REWRITTEN
    + "zeros up to a head dim that a kernel has, or calls for some of the value dims each"
)
_REFUSES = "cudnn/plan: cuDNN refuses the graph: "
_ENDS = " (cuDNN #.#)"
_RULES = {
    _TAKES + "kernels for other dtypes; the vendors have none": ("dtype",),
    _OTHER_DIMS: (
        "aiter/head_dim",
        f"{_REFUSES}Num hidden_dim should be less than or equal to # and hidden_dim should be "
        "multiple of # when d_qk != d_v, unless both head dims are in (#, #] and multiples of #"
        + _ENDS,
        f"{_REFUSES}Num hidden_dim d_v should be equal to # if d_qk is #{_ENDS}",
    ),
    _OTHER_DIMS
    + ". Where cuDNN has no kernel so wide, it *would take* one; what the dims past 128 add to a "
    "score could go in as a bias, which is an array [B, N, T, S] of float32": (
        f"{_REFUSES}Num hidden_dim should be less than or equal to # and hidden_dim should be "
        "multiple of #" + _ENDS,
    ),
    _REWRITTEN
    + "as a padded batch of the sequences, where that has no more pairs than the packed rows: pass "
    "max_segment_len, or cu_seqlens; else as a mask": (
        f"{_REFUSES}Packed/ragged LSE is not supported for bprop thd on SM#X and SM#X GPUs{_ENDS}",
    ),
    _AS_MASK: (
        "max_segments",
        "aiter/bias_packed",
        "cudnn/bottom_right",
        "cudnn/packed_bias",
        "cudnn/arrays_by_row",
        "feature/mask_mod",
        "cudnn/mods/mask_mod/array_by_s",
        "cudnn/mods/mask_mod/array_by_b_and_s",
    ),
    _REWRITTEN + "in 16 bits where that changes no number, else by XLA, decided when it runs": (
        "bias_dtype",
    ),
    _REWRITTEN + "the gradient follows from lse, delta and sinks": ("row_bias_gradient",),
    _TAKES + "a call for some of the batch rows at a time": ("aiter/int32",),
    _REWRITTEN + "that gradient by XLA, beside the kernel": (
        "feature/the gradient of alibi_slopes",
        "cudnn/known_bug/bias_gradient_soft_cap",
    ),
    _TAKES + "instances of CK's kernel that have both": ("aiter/soft_cap_bias",),
    _TAKES + "a backward kernel with a soft cap: CK has none": (
        "aiter/soft_cap_gradient",
        "aiter/asm_soft_cap_gradient",
    ),
    _REWRITTEN + "as a bias of 0 and -inf": ("feature/mask",),
    _REWRITTEN + "as a float32 bias over pairs of queries and keys, up to 2^27 of them": (
        "cudnn/alibi_by_row",
        "cudnn/alibi_from_lengths",
    ),
    _REWRITTEN + "put into out and lse afterwards": (
        "feature/sinks",
        "cudnn/sinks_by_row",
        "cudnn/sinks_mask_mod",
    ),
    _REWRITTEN + "read from the kernel's output for known values": (
        "feature/the dropout mask as a result",
        "cudnn/packed_keep",
    ),
    _REWRITTEN + "a call for each key": ("dropout_keys",),
    _REWRITTEN + "by XLA, beside the kernel": (
        "feature/the row maximum",
        "cudnn/known_bug/row_max_sinks",
    ),
    _TAKES + "a deterministic kernel there that sums in less memory": (
        "aiter/dq_bytes",
        "cudnn/workspace",
        f"{_REFUSES}Deterministic algorithm is not supported for bprop thd on SM#X and SM#X GPUs"
        + _ENDS,
        f"{_REFUSES}Deterministic algorithm is not supported on blackwell architecture when dbias, "
        f"rng/dropout, alibi is enabled{_ENDS}",
    ),
    _REWRITTEN + "what it adds to the score, as a bias over pairs, up to 2^27 of them": (
        "cudnn/mods/score_mod/arrays",
    ),
    _REWRITTEN + "as a soft cap, ALiBi or a bias over pairs, where it is one of them": (
        "feature/score_mod",
    ),
}
"""What helps, and the rules against which it does."""

_BY_CK = "CK runs the call, where it is built and no other reason is given"

_ANSWERS = {rule: answer for answer, rules in _RULES.items() for rule in rules}

Notes = dict[tuple[str, str], int]
"""The number of each reason on the page, by rule and sentence."""


def refusals(matrix: Matrix) -> dict[str, dict[str, dict[str, str]]]:
    """What is not planned, by the label of the call, then direction and arch: rules, sentences."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for (label, direction, arch), cell in matrix.cells.items():
        if why := cell.sentences | ({"crash": cell.crash} if cell.crash else {}):
            found.setdefault(label, {})[f"{direction} {arch}"] = why
    return found


def document(matrix: Matrix) -> str:
    """The text of the page."""
    notes: Notes = {}
    lines = [_TITLE, "", _INTRO.format(version=matrix.version_text)]
    for section, calls in SECTIONS.items():
        lines += [f"## {section}", ""]
        lines += ["| | " + " | ".join([*ARCHS, *AMD, "XLA"]) + " |"]
        lines += ["|---" * (len(ARCHS) + len(AMD) + 2) + "|"]
        for label in calls:
            cells = [_cell(matrix, label, arch, notes) for arch in ARCHS]
            cells += [_amd_cell(label, device, notes) for device in AMD.values()]
            cells.append(_xla_cell(label, notes))
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["## Why not", "", _WHY_NOT, ""]
    lines += [f"{number}. {text}. {_answer(rule)}" for (rule, text), number in notes.items()]
    lines.append("")
    return "\n".join(lines)


def _cell(matrix: Matrix, label: str, arch: str, notes: Notes) -> str:
    sentences = [matrix.cells[label, x, arch].sentences for x in ("forward", "backward")]
    return _text(sentences, notes)


def _xla_cell(label: str, notes: Notes) -> str:
    specs = (CASES[label].spec(x) for x in ("forward", "backward"))
    reasons = (xla.not_supported_reasons(spec, parse("sm90")) for spec in specs)
    return _text([{x.rule: x.text for x in why} for why in reasons], notes)


def _amd_cell(label: str, device: Device, notes: Notes) -> str:
    """The cell of AITER: ASM, CK with the reasons against ASM, or the reasons against both."""
    (release,), found = aiter_folder.releases_for(device), list[str]()
    for letter, direction in zip("FB", ("forward", "backward"), strict=True):
        spec = CASES[label].spec(direction)
        call = call_for(spec, device.arch, release)
        against = aiter.not_supported_reasons(spec, device)
        why = against or kernel_for(call, device.arch, release).why_not_asm
        numbers = ",".join(str(_number(x.rule, x.text, notes)) for x in why)
        shown = f"~~{letter}~~" if against else letter if why else f"**{letter}**"
        found.append(f"{shown} {numbers}".rstrip())
    return " ".join(found)


def _number(rule: str, text: str, notes: Notes) -> int:
    """The number of a reason. Reasons against ASM are the same where CK is not built."""
    return notes.setdefault((rule, text.removesuffix(f" ({NO_CK})")), len(notes) + 1)


def _answer(rule: str) -> str:
    return _ANSWERS.get(rule) or (_BY_CK if rule.startswith("aiter/asm_") else _ANSWERS[rule])


def _text(sentences: list[dict[str, str]], notes: Notes) -> str:
    return " ".join(_letters(sentences, notes))


def _letters(sentences: list[dict[str, str]], notes: Notes) -> Iterator[str]:
    for letter, why in zip("FB", sentences, strict=True):
        numbers = [notes.setdefault(reason, len(notes) + 1) for reason in why.items()]
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
