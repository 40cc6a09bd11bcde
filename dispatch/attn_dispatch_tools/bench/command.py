"""The `attn-dispatch bench` command."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from types import ModuleType

from attn_dispatch.files import writing
from attn_dispatch.text import counted, error_text
from attn_dispatch_tools.bench import peers
from attn_dispatch_tools.bench import report as reports
from attn_dispatch_tools.bench.cells import WORK, Cell
from attn_dispatch_tools.bench.grids import GRIDS
from attn_dispatch_tools.bench.measure import Options
from attn_dispatch_tools.bench.regret import command as regret
from attn_dispatch_tools.bench.report import Report
from attn_dispatch_tools.bench.run import present, run
from attn_dispatch_tools.bench.screen import show, watched
from attn_dispatch_tools.bench.table import markdown
from attn_dispatch_tools.reports.environment import file_name
from attn_dispatch_tools.reports.html_page import NO_MATPLOTLIB, page
from attn_dispatch_tools.terminal.folder import made_folder
from attn_dispatch_tools.terminal.help import Commands, add_command, flag, option
from attn_dispatch_tools.terminal.name_patterns import matches
from attn_dispatch_tools.terminal.number_arguments import positive

_DESCRIPTION = """\
Measure attention beside every other package that is installed: wall time, device time, memory and
the cost of the first call. All packages take turns in one run; torch runs in a separate process. A
package that is absent or refuses a call is listed with the reason.

The JSON file is saved after each cell, and never replaces one of an earlier run. --plot makes plots
and a table from such files.
"""
_EXAMPLES = (
    "attn-dispatch bench --out results",
    "attn-dispatch bench --grid dense --cells 'd128*' --peer ours --peer 'jax.nn*'",
    "attn-dispatch bench --grid masks --peer 'ours*' --peer 'dense*'",
    "attn-dispatch bench --plot results/bench.json --out plots",
)


def add_parser(commands: Commands, help: str) -> None:
    """Add `bench` to the parser of `attn-dispatch`."""
    parser = add_command(
        commands, "bench", main, help=help, description=_DESCRIPTION, examples=_EXAMPLES,
        options=(
            option("--grid", "GRID",
                f"{', '.join(GRIDS)}; may be repeated (default: all, in this order)",
                choices=[*GRIDS], dest="grids", action="append"),
            option("--cells", "GLOB", "only cells named like this: 'd128*16k'; may be repeated",
                action="append"),
            option("--peer", "GLOB", "only peers named like this: 'ours*'; may be repeated",
                dest="peers", action="append"),
            option("--direction", None, "may be repeated (default: forward, and forward_backward)",
                choices=[*WORK], dest="directions", action="append"),
            option("--rounds", "N",
                "measurements of each peer (default: enough for each peer to follow every other "
                "one equally often)", type=positive(int)),
            option("--seconds", "S",
                f"length of one measurement (default: {Options.seconds}; for regret 0.01)",
                type=positive(float)),
            option("--time-limit", "S",
                "start no measurement after this many seconds; finished ones are saved",
                type=positive(float)),
            flag("--no-device-time", "leave out the profiler",
                dest="device_time", action="store_false"),
            option("--torch-python", "PATH", "the Python that has torch, if it is not this one"),
            option("--out", "FOLDER",
                "where the JSON file, or plots and the table, are written (default: here)",
                type=Path, default=Path()),
            option("--plot", "FILE", "measure nothing; make plots and a table of these JSON files",
                type=Path, nargs="+"),
            flag("--html", "also write one HTML file that holds the table and all plots"),
        ),
    )  # fmt: skip
    regret.add_arguments(parser)


def main(args: argparse.Namespace) -> None:
    """Measure or plot. Ends the process with status 1 if nothing was measured, and with 130 if the
    run was interrupted."""
    try:
        if args.plot or regret.is_asked(args):
            folder = made_folder(args.out)
            plot(args.plot, folder, is_html=args.html) if args.plot else regret.run(args, folder)
            return
        if args.html:
            _plots_module()  # raises if something is missing, before the measurements and not after
            page("")
        started = time.monotonic()
        cells = _cells(args)
        directions = args.directions or ["forward", "forward_backward"]
        chosen = peers.named(args.peers or ["*"], peers.all_peers(args.torch_python))
        folder = made_folder(args.out)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        sys.exit(f"error: {error_text(error)}")
    limit = float("inf") if args.time_limit is None else args.time_limit
    options = Options(
        args.rounds, args.seconds or Options.seconds, args.device_time, started + limit
    )
    usable, facts = present(chosen)
    recorded = ("rounds", "seconds", "time_limit", "device_time", "cells")
    report = Report(facts, {x: getattr(args, x) for x in recorded})
    grids = "+".join(dict.fromkeys(cell.grid for cell in cells))
    kind = "bench" if grids == "+".join(GRIDS) else f"bench-{grids}"
    path = _unused(folder / f"{file_name(kind, facts)}.json")
    versions = f"cuDNN {facts['cudnn']}, JAX {facts['jax']}"
    print(f"{facts['device']}, {versions}: {counted(len(cells), 'cell')}")
    for name, reason in facts["absent"].items():
        print(f"absent: {name}: {reason}")
    print(f"each line: {' / '.join(directions)}, - where there is no number", flush=True)
    for _ in watched(run(cells, usable, directions, options, report, path), len(cells)):
        pass
    show(report)
    if report.not_measured:
        print(f"{report.stopped}: {len(report.not_measured)} cells were not measured")
    if path.exists():
        print(path)
        if args.html:
            plot([path], folder, is_html=True)
    if report.stopped == "interrupted":
        sys.exit(130)
    sys.exit(0 if report.peers else 1)


def plot(files: list[Path], folder: Path, *, is_html: bool = False) -> None:
    """Write the plots (SVG) and the table (Markdown) of JSON files, and print the paths.

    With `is_html`, also write one HTML file that holds both.

    Raises:
      ModuleNotFoundError: matplotlib is missing; or rich, which HTML needs.
      ValueError: `attn-dispatch bench` did not write a file, or the files come from different
        machines.
    """
    report = reports.read(files)
    try:
        has_only_masks = all(x.cell.mask is not None for x in report.cells)
        kind = "bench-masks" if has_only_masks else "bench"
        table, name = markdown(report), file_name(kind, report.environment)
        written = _plots_module().draw(report, folder)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        named = ", ".join(map(str, files))
        raise ValueError(
            f"expected JSON files of `attn-dispatch bench`, got {named} ({error!r})"
        ) from error
    path = folder / f"{name}.md"
    writing.replace(path, table.encode())
    if is_html:
        whole = path.with_suffix(".html")
        writing.replace(whole, page(table, written).encode())
        written.append(whole)
    for x in (*written, path):
        print(x)


def _plots_module() -> ModuleType:
    try:
        from attn_dispatch_tools.bench import plots
    except ImportError:
        raise ModuleNotFoundError(NO_MATPLOTLIB) from None
    return plots


def _cells(args: argparse.Namespace) -> list[Cell]:
    grids, patterns = dict.fromkeys(args.grids or GRIDS), args.cells or ["*"]
    for pattern in patterns:
        if not any(matches(x.name, pattern) for grid in grids for x in GRIDS[grid]):
            raise ValueError(f"no cell of {', '.join(grids)} is named like {pattern!r}")
    cells = [x for grid in grids for x in GRIDS[grid]]
    return [x for x in cells if any(matches(x.name, pattern) for pattern in patterns)]


def _unused(path: Path) -> Path:
    """The path; with a number if it exists, so that results of an earlier run are kept."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(x for x in itertools.chain([path], numbered) if not x.exists())
