"""The `attn-dispatch verify` command."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from attn_dispatch import settings
from attn_dispatch.core import select
from attn_dispatch.devices.target import default_device
from attn_dispatch.files import writing
from attn_dispatch.text import counted, error_text
from attn_dispatch_tools.reports.environment import environment
from attn_dispatch_tools.reports.html_page import NO_MATPLOTLIB, page
from attn_dispatch_tools.terminal.folder import made_folder
from attn_dispatch_tools.terminal.help import Commands, add_command, flag, option
from attn_dispatch_tools.terminal.name_patterns import matches
from attn_dispatch_tools.terminal.number_arguments import at_least
from attn_dispatch_tools.verify import draws, pool, screen
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.cases import BY_NAME, CASES
from attn_dispatch_tools.verify.each_rewrite import each_rewrite
from attn_dispatch_tools.verify.mask_draws import mask_examples
from attn_dispatch_tools.verify.outcome import Outcome
from attn_dispatch_tools.verify.report import Report, bad_cases, read
from attn_dispatch_tools.verify.serving_draws import serving_examples
from attn_dispatch_tools.verify.wide_cases import wide_examples

_DESCRIPTION = """\
Run the conformance suite on this machine's device: some hundred attention calls, whose results
and gradients are compared with a float64 reference. All padding holds NaN, and so do results and
workspaces before each call. Cases run in worker processes, so that a crash is reported and the
other cases still run.

The report lists cases, outcomes and versions. Exit status 1: a case failed or crashed, or none
passed.
"""
_EXAMPLES = (
    "attn-dispatch verify --out report",
    "attn-dispatch verify --cases 'window/*' --jobs 4",
    "attn-dispatch verify --random 1000 --implementation xla",
    "attn-dispatch verify --cases '' --random 1000 --serving",
    "attn-dispatch verify --cases '' --random 1000 --masks --implementation fa4",
    "attn-dispatch verify --repeat report/verify-cudnn-NVIDIA_H200-9_19_0.json",
    "attn-dispatch verify --plot report/verify-cudnn-NVIDIA_H200-9_19_0.json",
)
_MAX_JOBS = 8

_DRAWN: dict[str, Callable[[int, int], list[Case]]] = {
    "": draws.examples, "serving": serving_examples, "masks": mask_examples,
    "wide": wide_examples,
}  # fmt: skip
"""What draws calls of a number and a seed, by the flag that asks for it."""


def add_parser(commands: Commands, help: str) -> None:
    """Add `verify` to the parser of `attn-dispatch`."""
    add_command(
        commands, "verify", main, help=help, description=_DESCRIPTION, examples=_EXAMPLES,
        options=(
            option("--implementation", None, "default: the vendor's for this device",
                choices=select.names()),
            option("--cases", "GLOBS",
                "only cases whose names match one of these: 'window/*_d64_*,found/*'", default="*"),
            flag("--list", "print the names of the cases, and run nothing"),
            option("--jobs", "N", "cases run at the same time (default: %(default)s)",
                type=at_least(1), default=default_jobs()),
            option("--random", "N", "also run N drawn cases", type=at_least(0), default=0),
            option("--seed", "SEED", "draw the cases of an earlier run again", type=at_least(0)),
            flag("--serving",
                "draw only calls of serving: decoding, drafts and chunks beside a cache, most in "
                "pages"),
            flag("--masks",
                "draw only calls with masks: ranges of keys that arrays tell, images, bits, masks "
                "by head, and queries that see nothing"),
            flag("--wide",
                "draw only calls with head dims from 257 to 512, most of them without a mask"),
            flag("--each-rewrite",
                "apply to each drawn case the least used of the rewrites that fit it, even if no "
                "kernel needs it"),
            option("--repeat", "REPORT",
                "run the cases that failed or crashed in this report (its JSON file) instead of "
                "named cases", type=Path),
            option("--out", "FOLDER",
                "where the report is written, as JSON and Markdown (default: here)",
                type=Path, default=Path()),
            flag("--html",
                "also write the report as one HTML file, with plots if matplotlib is installed"),
            option("--plot", "REPORT",
                "run nothing; write the HTML file of this report (its JSON file)", type=Path),
        ),
    )  # fmt: skip


def main(args: argparse.Namespace) -> None:
    """Run the chosen cases; exits with status 1 if cases failed or none passed, 130 if
    interrupted."""
    # This process only identifies the device, and must leave its memory to the workers.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _check_flags_of_drawn_cases(args)
    try:
        if args.plot is not None:
            report = read(args.plot)
            _say_if_no_plots()
            print(write_page(report, made_folder(args.out) / f"{args.plot.stem}.html"))
            return
        implementation = args.implementation or default_implementation()
        cases, options = _chosen(args)
        if args.list:
            print("\n".join(case.name for case in cases))
            return
        _check_can_run(args, implementation)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        sys.exit(f"error: {error_text(error)}")
    print(f"{counted(len(cases), 'case')} of {implementation}, {args.jobs} at a time")
    report = run(cases, implementation, args.jobs, options | _settings())
    if report.outcomes:
        screen.show(report)
    is_interrupted = "interrupted" in report.options
    if is_interrupted:
        print(f"interrupted: {len(report.outcomes)} of {len(cases)} cases were done")
    if report.outcomes or not is_interrupted:  # otherwise an earlier report stays
        _write(report, args)
    sys.exit(130 if is_interrupted else 0 if report.is_good else 1)


def _check_flags_of_drawn_cases(args: argparse.Namespace) -> None:
    """End the process if a flag about drawn cases is given, but none are drawn."""
    kinds = [x for x in _DRAWN if x and getattr(args, x)]
    if len(kinds) > 1:
        sys.exit(
            f"error: --{kinds[1]}: expected no --{kinds[0]} beside it, as each draws other calls"
        )
    for name in ("each_rewrite", "serving", "masks", "wide", "seed"):
        is_given = getattr(args, name) is not None and getattr(args, name) is not False
        if is_given and not args.random:
            flag = name.replace("_", "-")
            sys.exit(
                f"error: --{flag}: expected --random N as well, because it is about drawn cases"
            )


def _chosen(args: argparse.Namespace) -> tuple[list[Case], dict[str, object]]:
    """The named and the drawn cases, and their options for the report."""
    cases, options = _named(args)
    if args.random:
        drawn, facts = _drawn(args)
        cases, options = cases + drawn, options | facts
    if not cases:
        which = f"named like {args.cases!r}" if args.repeat is None else "bad in that report"
        raise ValueError(f"no case is {which}")
    return cases, options


def _check_can_run(args: argparse.Namespace, implementation: str) -> None:
    """Raise an error before the cases run if they could not run, or the report not be written."""
    if args.html:
        page("")  # raises if rich is missing
        _say_if_no_plots()
    if unusable := select.named(implementation).unusable_reason(default_device()):
        sys.exit(f"error: {implementation} cannot run here: {unusable}")
    made_folder(args.out)


def _write(report: Report, args: argparse.Namespace) -> None:
    """Write the report's files, and print their paths."""
    written = [*report.write(args.out)]
    if args.html:
        written.append(write_page(report, written[0].with_suffix(".html")))
    for path in written:
        print(path)


def _settings() -> dict[str, object]:
    """The settings in force that change how calls run and are not the defaults."""
    current = settings.current()
    found: dict[str, object] = {}
    if not current.rewrites:
        found["rewrites"] = False
    if not current.aiter_asm:
        found["aiter_asm"] = False
    if current.scratch_limit is not None:
        found["scratch_limit"] = current.scratch_limit
    if current.tuning_seconds is not None:
        found["tuned"] = current.tuning_seconds
    return found


def _drawn(args: argparse.Namespace) -> tuple[list[Case], dict[str, object]]:
    """The drawn cases and their options for the report; prints how to draw them again, on stderr if
    stdout lists names."""
    seed = random.randrange(2**32) if args.seed is None else args.seed
    kind = next((x for x in _DRAWN if x and getattr(args, x)), "")
    again = f"--random {args.random}{f' --{kind}' if kind else ''} --seed {seed}"
    where = sys.stderr if args.list else sys.stdout
    print(f"{counted(args.random, 'drawn case')}; {again} draws them again", file=where)
    options: dict[str, object] = {"random": args.random, "seed": seed}
    if kind:
        options |= {kind: True}
    drawn = _DRAWN[kind](args.random, seed)
    if args.each_rewrite:
        options |= {"each_rewrite": True}
        drawn = each_rewrite(drawn)
    return drawn, options


def write_page(report: Report, path: Path) -> Path:
    """Write the report as one HTML file with its plots inside, and return the path.

    Without matplotlib it has none.

    Raises:
      ModuleNotFoundError: rich is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        plots = _plots_module()
        pictures = plots.draw(report, Path(folder)) if plots else []
        writing.replace(path, page(report.markdown(), pictures).encode())
    return path


def _plots_module() -> ModuleType | None:
    try:
        from attn_dispatch_tools.verify import plots
    except ImportError:
        return None
    return plots


def _say_if_no_plots() -> None:
    if _plots_module() is None:
        print(f"the page will have no plots: {NO_MATPLOTLIB}", file=sys.stderr)


def run(
    cases: Sequence[Case],
    implementation: str,
    jobs: int,
    options: dict[str, object],
) -> Report:
    """The report of these cases, in their order; if interrupted, of the finished ones."""
    started = time.monotonic()
    outcomes = pool.run(cases, pool.command(implementation), jobs)
    by_name: dict[str, Outcome] = {}
    try:
        for outcome in screen.watched(outcomes, len(cases)):
            by_name[outcome.case] = outcome
    except KeyboardInterrupt:
        options = options | {"interrupted": True}
    done = [case for case in cases if case.name in by_name]
    calls = {case.name: case.to_json() for case in cases if BY_NAME.get(case.name) != case}
    return Report(
        environment=environment(),
        implementation=implementation,
        options=options,
        outcomes=tuple(replace(by_name[x.name], call=calls.get(x.name, {})) for x in done),
        seconds=time.monotonic() - started,
    )


def default_implementation() -> str:
    """The vendor's implementation for this machine's device, or XLA if there is none."""
    platform = default_device().platform
    vendors = (x for x in select.implementations() if not x.IS_EXTRA and x.PLATFORM == platform)
    return next(vendors, select.implementations()[-1]).NAME


def default_jobs() -> int:
    """One job for every two processors, at most 8."""
    return max(1, min(_MAX_JOBS, len(os.sched_getaffinity(0)) // 2))


def _named(args: argparse.Namespace) -> tuple[list[Case], dict[str, object]]:
    """The chosen cases of the table, or the bad ones of a report, and options for the report."""
    if args.repeat is not None:
        return bad_cases(args.repeat), {"repeat": args.repeat.name, "jobs": args.jobs}
    patterns = args.cases.split(",")
    cases = [x for x in CASES if any(matches(x.name, pattern) for pattern in patterns)]
    return cases, {"cases": args.cases, "jobs": args.jobs}
