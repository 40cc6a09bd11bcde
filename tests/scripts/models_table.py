"""Writes docs/models.md: the implementation that runs each model's calls, and their rewrites.

usage: python -m tests.scripts.models_table

It plans every call for six kinds of GPU with the installed cuDNN. That takes minutes but no GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import attn_dispatch
from attn_dispatch.core.rewrites import REWRITES
from attn_dispatch.core.verdict import Verdict
from tests.support.model_calls import MODEL_CALLS, ModelCall

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
SHOWN = {"sm90": "H100", "gfx942": "MI300X"}
OTHERS = ("sm80", "sm100", "sm120", "gfx950")
OURS = ("cudnn", "aiter", "xla")
"""The implementations that need no other package."""

IN_PARTS = "in parts of the batch or of the heads, one after the other"
_SIZE_OF_PARTS = re.compile(r"in parts of \d+ (batch row|head)s?, one after the other")

_INTRO = """\
# Calls of real models

These are {number} attention calls, with the heads, head dims, lengths and options of public models,
in bfloat16. For each of them the table shows, according to `explain`, what runs it on an H100 and
on an MI300X, and with which rewrites ([design.md](design.md#rewrites)); numbers refer to the list
below. Calls on a cache have no backward pass. Implementations that need another package are left
out.

`python -m tests.scripts.models_table` writes this page. `make test` compares it with the actual
choices for all calls on an MI300X and for every fourth on an H100, and `make soak` for all on both.
"""


ARGUMENTS = """\
`…` stands for query, key and value, or for query and the pages of keys and values. An array is
shown by its dtype and shape. [caches.md](caches.md) explains the calls with caches.
"""


@dataclass(frozen=True)
class Run:
    """The implementation and rewrites that run one direction of a call."""

    implementation: str
    rewrites: tuple[str, ...]


def _run(verdicts: Iterable[Verdict]) -> Run:
    """The first verdict without a reason, which exists since XLA runs every call."""
    verdict = next(x for x in verdicts if x.is_eligible)
    names = (_SIZE_OF_PARTS.sub(IN_PARTS, name) for name in verdict.rewrites)
    return Run(verdict.implementation, tuple(dict.fromkeys(names)))


def runs(call: ModelCall, target: str) -> tuple[Run, ...]:
    """The runs of a call: its forward pass and, in training, its backward pass."""
    found = attn_dispatch.explain(**call.arguments, implementation=OURS, target=target)
    directions = (found.forward, found.backward) if call.is_training else (found.forward,)
    return tuple(map(_run, directions))


Runs = Mapping[tuple[str, str], tuple[Run, ...]]
"""The runs of each call, by the call's name and the target."""


def row(call: ModelCall, by_target: Mapping[str, tuple[Run, ...]], numbers: list[str]) -> str:
    """The row of a call in the first table, with the numbers of its rewrites."""
    cells = [call.model, call.what]
    for target in SHOWN:
        directions = by_target[target]
        cells += [_cell(x, numbers) for x in directions] + [""] * (2 - len(directions))
    return f"| {' | '.join(cells)} |"


def _cell(run: Run, numbers: list[str]) -> str:
    taken = ", ".join(str(numbers.index(name) + 1) for name in run.rewrites)
    name = {"cudnn": "cuDNN", "aiter": "AITER", "xla": "XLA"}[run.implementation]
    return f"{name} ({taken})" if taken else name


def taken_on(found: Runs) -> dict[str, list[str]]:
    """The targets on which a call takes each rewrite, by the rewrite's name."""
    targets: dict[str, list[str]] = {}
    for (_, target), directions in found.items():
        for name in (x for run in directions for x in run.rewrites):
            if target not in targets.setdefault(name, []):
                targets[name].append(target)
    return targets


def arguments_list() -> list[str]:
    """A line with the shapes, the function and the arguments of each call."""
    return [f"- **{x.model}**, {x.what}: {x.shapes}. `{x.written}`" for x in MODEL_CALLS]


def document(found: Runs) -> str:
    """The text of the page."""
    targets = taken_on(found)
    order = [*(x.name for x in REWRITES), IN_PARTS]
    numbers = [name for name in order if name in targets]
    numbers += sorted(targets.keys() - set(order))
    headers = [f"{name} {way}" for name in SHOWN.values() for way in ("forward", "backward")]
    lines = [_INTRO.format(number=len(MODEL_CALLS))]
    lines += [f"| model | call | {' | '.join(headers)} |", "|---" * 6 + "|"]
    for call in MODEL_CALLS:
        by_target = {target: found[str(call), target] for target in SHOWN}
        lines.append(row(call, by_target, numbers))
    lines += ["", "## Shapes and arguments", "", ARGUMENTS, *arguments_list()]
    lines += ["", "## Rewrites that they take", ""]
    lines += ["With the GPUs, by architecture, for which one of the calls takes them.", ""]
    lines += [f"{i}. {name} ({', '.join(targets[name])})" for i, name in enumerate(numbers, 1)]
    lines += ["", "## Rewrites that they do not take", ""]
    lines += ["Each is needed for another call, which the conformance suite or a test names.", ""]
    rest = [x for x in REWRITES if x.name not in targets]
    lines += [f"- {x.name}: `{x.needed_for}`" for x in rest]
    return "\n".join([*lines, ""])


def main() -> None:
    every = (*SHOWN, *OTHERS)
    found = {(str(call), target): runs(call, target) for target in every for call in MODEL_CALLS}
    DOCUMENT.write_text(document(found))


if __name__ == "__main__":
    main()
