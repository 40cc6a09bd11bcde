"""Counts instructions of AITER's kernels that follow sooner than compilers let them.

usage: python -m tests.scripts.wait_states [--report FOLDER]

Kernels are those of the wheel, and of AITER's sources if ATTN_DISPATCH_AITER_DIR names a folder;
some minutes for each. --report writes the counts as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from attn_dispatch_tools.reports.environment import environment
from tests.support.cdna import generations
from tests.support.cdna.listings import machine
from tests.support.cdna.wait_states import STATES_OF_BRANCH, TooSoon, too_soon


def _counts(found: dict[Path, list[TooSoon]]) -> dict[str, Any]:
    """By rule: kernels, pairs, and the fewest wait states beside those that compilers leave."""
    by_rule = defaultdict[str, list[tuple[Path, TooSoon]]](list)
    for path, pairs in found.items():
        for x in pairs:
            by_rule[x.rule].append((path, x))
    counts: dict[str, Any] = {}
    for rule, some in sorted(by_rule.items()):
        closest = min((x for _, x in some), key=lambda x: x.states)
        counts[rule] = {
            "kernels": len({path for path, _ in some}), "pairs": len(some),
            "fewest": closest.states, "wanted": closest.wanted,
        }  # fmt: skip
    return counts


def _found(generation: str, arch: str) -> dict[str, Any]:
    paths = generations.code_objects(generation, arch)
    counted: dict[str, Any] = {"kernels": len(paths)}
    codes = {x: machine().load(x)[1] for x in paths}
    for states in (1, STATES_OF_BRANCH):
        found = {
            x: too_soon(code, machine().ops, arch, states_of_branch=states)
            for x, code in codes.items()
        }
        counted[f"a branch counts as {states}"] = _counts(found)
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path)
    chosen = parser.parse_args()
    found: dict[str, Any] = {}
    for generation in generations.GENERATIONS:
        if missing := generations.missing(generation):
            print(missing)
            continue
        version = ".".join(map(str, generations.release(generation).version))
        name = "dev18" if generation == "dev18" else f"v{version}"
        for arch in generations.ARCHS:
            found[f"{name} {arch}"] = _found(generation, arch)
    facts = environment()
    report = {
        "environment": {x: facts[x] for x in ("date", "commit", "python", "attn_dispatch")},
        "found": found,
    }
    text = json.dumps(report, indent=1) + "\n"
    if chosen.report:
        (chosen.report / "cdna_wait_states.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
