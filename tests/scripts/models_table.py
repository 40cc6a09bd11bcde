"""Writes which implementation runs the calls of real models, and by which rewrites.

usage: python -m tests.scripts.models_table

The table goes to docs/features.md, and tests/results/models.json also has the rewrites. It plans
every call for six kinds of GPU with the installed cuDNN. That takes minutes but no GPU.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import attn_dispatch
from attn_dispatch.core.verdict import Verdict
from tests.support.model_calls import MODEL_CALLS, ModelCall
from tests.support.page_tables import with_table
from tests.support.repository import DOCS, TESTS

DOCUMENT = DOCS / "features.md"
RECORD = TESTS / "results" / "models.json"
SHOWN = {"sm90": "H100", "gfx942": "MI300X"}
OTHERS = ("sm80", "sm100", "sm120", "gfx950")
OURS = ("cudnn", "aiter", "xla")
"""The implementations that need no other package."""

IN_PARTS = "in parts of the batch or of the heads, one after the other"
_SIZE_OF_PARTS = re.compile(r"in parts of \d+ (batch row|head)s?, one after the other")


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


Runs = Mapping[str, Mapping[str, tuple[Run, ...]]]
"""The runs of each call, by the call and the target."""


def recorded(found: Runs) -> dict[str, object]:
    """What the record holds: the calls on the shown targets, and the targets of each rewrite."""
    calls = {
        call: {x: [[run.implementation, *run.rewrites] for run in by_target[x]] for x in SHOWN}
        for call, by_target in found.items()
    }
    return {"calls": calls, "rewrites": _targets_of_rewrites(found)}


def _targets_of_rewrites(found: Runs) -> dict[str, list[str]]:
    targets: dict[str, list[str]] = {}
    for target in (*SHOWN, *OTHERS):
        for by_target in found.values():
            for name in (x for run in by_target[target] for x in run.rewrites):
                if target not in targets.setdefault(name, []):
                    targets[name].append(target)
    return targets


def table(calls: Mapping[str, Mapping[str, list[list[str]]]]) -> list[str]:
    """The lines of the table, from the calls in the record."""
    ways = [f"{name} {way}" for name in SHOWN.values() for way in ("forward", "backward")]
    lines = [f"| model | call | {' | '.join(ways)} |", "|---" * 6 + "|"]
    for call in MODEL_CALLS:
        cells = [call.model, call.what]
        for target in SHOWN:
            runs_there = calls[str(call)][target]
            cells += [_cell(*x) for x in runs_there] + [""] * (2 - len(runs_there))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(implementation: str, *rewrites: str) -> str:
    name = {"cudnn": "cuDNN", "aiter": "AITER", "xla": "XLA"}[implementation]
    return f"{name} *" if rewrites else name


def main() -> None:
    found = {str(x): {y: runs(x, y) for y in (*SHOWN, *OTHERS)} for x in MODEL_CALLS}
    record = recorded(found)
    RECORD.write_text(json.dumps(record, indent=0) + "\n")
    calls = json.loads(RECORD.read_text())["calls"]
    DOCUMENT.write_text(with_table(DOCUMENT, "models_table", table(calls)))


if __name__ == "__main__":
    main()
