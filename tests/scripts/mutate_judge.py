"""Runs wrong implementations through drawn cases and asks whether the judge would notice.

usage: python -m tests.scripts.mutate_judge [--seed N] [--draws N] [--only GLOB]
                                                     [--jobs N] [--write]

Every one of tests/wrong_implementations runs cases of `verify.draws`, or of
`verify.serving_draws`, on the CPU, those in which its mistake can show, until one fails that
the right implementation passes. What no case notices survives; the exit status says whether
anything did.

--write keeps in judged.json which case noticed which mistake: test_judge.py runs them again.
"""

from __future__ import annotations

import os

from tests.support.repository import TESTS

# Read when numpy and JAX are imported, also in the processes that this one starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import fnmatch
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial

import rich.progress
import rich.table

from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.serving_draws import serving_examples
from attn_dispatch_tools.verify.suite import Conformance
from tests.wrong_implementations import WRONG, Wrong

RECORD = TESTS / "wrong_implementations" / "judged.json"


class OnCpu(Conformance):
    """The suite as it judges XLA, under whatever name."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation

    @property
    def keeps_nan_in_documents(self) -> bool:
        return False

    @property
    def takes_delta_from_out(self) -> bool:
        return False


def failures(wrong: Wrong, case: Case) -> tuple[str, ...]:
    """What the suite says against a wrong implementation in a case; empty if it notices nothing."""
    wrong.calls = 0
    with wrong.installed():
        outcome = OnCpu(wrong.name).check(case)
    assert outcome.status != "refused", outcome.reasons
    assert wrong.calls, f"{wrong.name} was not called in {case.to_json()}"
    return outcome.failures


@lru_cache
def failures_of_the_right_one(case: Case) -> tuple[str, ...]:
    """What the suite says against XLA; empty as long as suite and XLA are right."""
    outcome = OnCpu("xla").check(case)
    assert outcome.status != "refused", outcome.reasons
    return outcome.failures


@lru_cache
def drawn(count: int, seed: int, *, of_serving: bool) -> list[Case]:
    """That many small cases."""
    examples = serving_examples if of_serving else draws.examples
    return examples(count, seed, draws.SMALL)


@dataclass(frozen=True)
class Verdict:
    """What became of one wrong implementation."""

    name: str
    tried: int
    """Drawn cases that it ran."""
    case: Case | None = None
    """The one that noticed; None if it survives."""
    said: str = ""


def verdict_on(name: str, count: int, seed: int) -> Verdict:
    """Draws until a case fails, or for as long as there are cases."""
    wrong, tried = WRONG[name], 0
    for case in drawn(count, seed, of_serving=name.startswith("serving/")):
        if not wrong.applies_to(case):
            continue
        tried += 1
        said = failures(wrong, case)
        if said:
            others = failures_of_the_right_one(case)
            assert not others, f"the right implementation fails {case.to_json()}: {others}"
            return Verdict(name, tried, case, said[0])
    return Verdict(name, tried)


def table(verdicts: list[Verdict]) -> rich.table.Table:
    """A line for each, survivors last."""
    found = rich.table.Table("wrong implementation", "cases run", "noticed by", "which says")
    for verdict in sorted(verdicts, key=lambda x: x.case is None):
        if verdict.case is None:
            says = f"[red]{WRONG[verdict.name].says}"
            found.add_row(verdict.name, str(verdict.tried), "[red]SURVIVES", says)
        else:
            said = verdict.said.replace("[", r"\[")
            found.add_row(verdict.name, str(verdict.tried), verdict.case.name, said)
    return found


def write(verdicts: list[Verdict]) -> None:
    """Keeps the cases, and by whom each mistake was noticed."""
    cases = {x.case.name: x.case.to_json() for x in verdicts if x.case is not None}
    noticed = {x.name: x.case and x.case.name for x in verdicts}
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    RECORD.write_text(
        f'{{"noticed_by": {json.dumps(noticed, indent=1)},\n"cases": {{\n'
        + ",\n".join(lines)
        + "\n}}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--draws", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--only", metavar="GLOB", default="*", help="only those named like this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help=f"keep the cases in {RECORD.name}")
    args = parser.parse_args()
    names = [name for name in WRONG if fnmatch.fnmatchcase(name, args.only)]
    if args.write and args.only != "*":
        parser.error("--write keeps all of them: leave --only out")

    run = partial(verdict_on, count=args.draws, seed=args.seed)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        found = rich.progress.track(pool.map(run, names), "judging", total=len(names))
        verdicts = list(found)

    rich.print(table(verdicts))
    survivors = [x.name for x in verdicts if x.case is None]
    print(f"{len(verdicts)} wrong implementations, {len(survivors)} survive")
    if args.write:
        write(verdicts)
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
