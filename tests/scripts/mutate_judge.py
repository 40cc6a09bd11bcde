"""Runs wrong implementations on drawn cases and checks that the judge notices.

usage: python -m tests.scripts.mutate_judge [--seed N] [--draws N] [--only GLOB]
                                                     [--jobs N] [--write]

Each of tests/wrong_implementations runs cases of `verify.draws`, or of `verify.serving_draws`, on
the CPU. Only cases in which its mistake can show are run, until one fails that the right
implementation passes. A mistake that no case notices survives; the exit status is 1 if any does.

--write stores the case that noticed each mistake in judged.json, which test_judge.py runs again.
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
    """The suite as for XLA, for an implementation of any name."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation

    @property
    def keeps_nan_in_documents(self) -> bool:
        return False

    @property
    def takes_delta_from_out(self) -> bool:
        return False


def failures(wrong: Wrong, case: Case) -> tuple[str, ...]:
    """The suite's findings against a wrong implementation in a case; empty if there are none."""
    wrong.calls = 0
    with wrong.installed():
        outcome = OnCpu(wrong.name).check(case)
    assert outcome.status != "refused", outcome.reasons
    assert wrong.calls, f"{wrong.name} was not called in {case.to_json()}"
    return outcome.failures


@lru_cache
def failures_of_the_right_one(case: Case) -> tuple[str, ...]:
    """The suite's findings against XLA; empty as long as suite and XLA are right."""
    outcome = OnCpu("xla").check(case)
    assert outcome.status != "refused", outcome.reasons
    return outcome.failures


@lru_cache
def drawn(count: int, seed: int, *, with_serving: bool) -> list[Case]:
    """Draw `count` small cases."""
    examples = serving_examples if with_serving else draws.examples
    return examples(count, seed, draws.SMALL)


@dataclass(frozen=True)
class Verdict:
    """The result for one wrong implementation."""

    name: str
    tried: int
    """The number of drawn cases that it ran."""
    case: Case | None = None
    """The case that noticed the mistake; None if it survives."""
    message: str = ""


def verdict_on(name: str, count: int, seed: int) -> Verdict:
    """Run cases until one fails, or all of them."""
    wrong, tried = WRONG[name], 0
    for case in drawn(count, seed, with_serving=name.startswith("serving/")):
        if not wrong.applies_to(case):
            continue
        tried += 1
        messages = failures(wrong, case)
        if messages:
            others = failures_of_the_right_one(case)
            assert not others, f"the right implementation fails {case.to_json()}: {others}"
            return Verdict(name, tried, case, messages[0])
    return Verdict(name, tried)


def table(verdicts: list[Verdict]) -> rich.table.Table:
    """A row for each verdict, survivors last."""
    found = rich.table.Table("wrong implementation", "cases run", "noticed by", "message")
    for verdict in sorted(verdicts, key=lambda x: x.case is None):
        if verdict.case is None:
            mistake = f"[red]{WRONG[verdict.name].description}"
            found.add_row(verdict.name, str(verdict.tried), "[red]SURVIVES", mistake)
        else:
            message = verdict.message.replace("[", r"\[")
            found.add_row(verdict.name, str(verdict.tried), verdict.case.name, message)
    return found


def write(verdicts: list[Verdict]) -> None:
    """Write the cases, and the name of the case that noticed each mistake."""
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
    parser.add_argument("--draws", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--only", metavar="GLOB", default="*", help="only those whose names match")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help=f"keep the cases in {RECORD.name}")
    args = parser.parse_args()
    names = [name for name in WRONG if fnmatch.fnmatchcase(name, args.only)]
    if args.write and args.only != "*":
        parser.error("--write needs all of them: leave --only out")

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
