"""Compares the lowered programs and verdicts of cases before and after a change.

usage: python -m tests.scripts.sameness FOLDER [--cases GLOB] [--random N] [--seed N]
       python -m tests.scripts.sameness FOLDER --against EARLIER_FOLDER
       python -m tests.scripts.sameness FOLDER --digests

The first form writes one file for each case: the lowered program of its forward and backward pass,
and the verdict of every implementation on each of its calls, for an H100, an MI300X and the CPU.
The second form prints the differences between two folders: programs must be equal, and verdicts may
differ only in wording. The third form writes the digests of the programs of all named cases to
tests/results/lowered-JAX_VERSION.json, which a test compares.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import attn_dispatch
from attn_dispatch.core.choice import order
from attn_dispatch.core.verdict import verdicts_on
from attn_dispatch.devices.target import device_for
from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.calls import CaseProgram, specs_in
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import CASES

OLDEST_JAX = "0.10.2"
RESULTS = Path(__file__).parents[1] / "results"
SCRATCH = re.compile(r"tensor<\d+xui8>")
TARGETS = {"sm90": "cuda", "gfx942": "rocm", "cpu": "cpu"}


def lowered_case(case: Case, target: str) -> dict[str, Any]:
    """The lowered program of a case, or the error of lowering it, and the verdicts on its calls."""
    operands = case.operands() | ({} if case.inference else case.cotangents())
    gradients = () if case.inference else case.gradients
    platform = TARGETS[target]
    with (
        # Rates change with each measurement; the programs of an implementation do not.
        mock.patch.object(order, "rates_for", lambda _: None),
        warnings.catch_warnings(action="ignore"),
        attn_dispatch.target(target),
        attn_dispatch.fallback("silent"),
    ):
        try:
            traced = jax.jit(CaseProgram.of(case, (), gradients).run).trace(operands)
            program = traced.lower(lowering_platforms=(platform,)).as_text()
        except NotImplementedError as error:
            return {"program": f"NotImplementedError: {error}", "verdicts": []}
        verdicts = [
            {
                "call": str(spec), "implementation": x.implementation,
                "reasons": [*map(str, x.reasons)],
                "plan": str(x.plan), "rewrites": x.rewrites,
                "as_it_is": [*map(str, x.reasons_as_it_is)],
                "scratch_bytes": x.scratch_bytes, "limit": x.limit,
            }
            for spec in specs_in(traced.jaxpr)
            for x in verdicts_on(spec, device_for(platform))
        ]  # fmt: skip
    return {"program": program, "verdicts": verdicts}


def digest(program: str) -> str:
    """A short hash of a lowered program that does not depend on the size of cuDNN's scratch memory.

    It is "refused" for a call that nothing runs, whatever the reasons.
    """
    if program.startswith("NotImplementedError"):
        return "refused"
    return hashlib.sha256(SCRATCH.sub("tensor<?xui8>", program).encode()).hexdigest()[:8]


def digests_file(version: str = jax.__version__) -> Path:
    """The digests of a JAX version; of any but the oldest, those that differ from the oldest's."""
    return RESULTS / f"lowered-{version}.json"


def read_digests() -> dict[str, dict[str, str]]:
    """The recorded digests of each named case, by target."""
    recorded = _oldest_digests() | json.loads(digests_file().read_text())
    return {name: dict(zip(TARGETS, text.split(), strict=True)) for name, text in recorded.items()}


def _oldest_digests() -> dict[str, str]:
    return json.loads(digests_file(OLDEST_JAX).read_text())


def write_digests(folder: Path) -> None:
    """Write one line for each named case that has a program in `folder`: a digest a target."""
    found = {
        case.name: " ".join(digest(read(file)[target]["program"]) for target in TARGETS)
        for case in sorted(CASES, key=lambda x: x.name)
        if (file := file_of(folder, case)).exists()
    }
    if jax.__version__ != OLDEST_JAX:
        oldest = _oldest_digests()
        found = {name: text for name, text in found.items() if text != oldest.get(name)}
    digests_file().write_text(json.dumps(found, indent=0, separators=(",", ":")) + "\n")
    print(f"{len(found)} cases in {digests_file()}")


def file_of(folder: Path, case: Case) -> Path:
    return folder / f"{case.name.replace('/', '-')}.json.gz"


def write(folder: Path, cases: Iterable[Case]) -> None:
    """Write a file for each case that has none, so that an interrupted run can continue."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, case in enumerate(cases):
        file = file_of(folder, case)
        if case.transform == "eager" or file.exists():
            continue
        found = {target: lowered_case(case, target) for target in TARGETS}
        partial = file.with_suffix(".partial")
        partial.write_bytes(gzip.compress(json.dumps(found).encode(), 1))
        partial.rename(file)
        if i % 50 == 0:
            print(f"{i}: {case.name}", flush=True)


def read(file: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(file.read_bytes()))


def compare(folder: Path, earlier: Path) -> bool:
    """Whether the programs are the same. Prints the differences."""
    names = sorted({x.name for y in (folder, earlier) for x in y.glob("*.json.gz")})
    if not names:
        sys.exit(f"neither {folder} nor {earlier} has cases")
    is_same, worded = True, 0
    for name in names:
        if not ((folder / name).exists() and (earlier / name).exists()):
            print(f"{name}: only in one folder")
            is_same = False
            continue
        now, before = read(folder / name), read(earlier / name)
        for target in TARGETS:
            for what in now[target]:
                if now[target][what] == before[target][what]:
                    continue
                worded += what == "verdicts"
                if what == "program" or worded <= 20:
                    print(f"{name}: {target}: {what} differs")
                is_same = is_same and what != "program"
    programs = "the same programs" if is_same else "OTHER PROGRAMS"
    print(f"{len(names)} cases: {programs}, {worded} with other verdicts")
    return is_same


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", default="*")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=4711)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--digests", action="store_true")
    args = parser.parse_args()
    if args.digests:
        return write_digests(args.folder)
    if args.against:
        sys.exit(not compare(args.folder, args.against))
    named = [x for x in CASES if fnmatch.fnmatch(x.name, args.cases)]
    write(args.folder, [*named, *draws.examples(args.random, args.seed)])


if __name__ == "__main__":
    main()
