"""`attn-dispatch bench --regret`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from attn_dispatch import fa4, flash
from attn_dispatch.files import reading
from attn_dispatch.text import counted
from attn_dispatch_tools.bench.regret.draws import drawn
from attn_dispatch_tools.bench.regret.run import save, timed_rows
from attn_dispatch_tools.bench.regret.summary import regrets, table
from attn_dispatch_tools.bench.regret.timed_call import TimedCall
from attn_dispatch_tools.reports.environment import environment, file_name
from attn_dispatch_tools.terminal.help import add_options, flag, option
from attn_dispatch_tools.terminal.number_arguments import positive

_SECONDS = 0.01
"""The default length of one measurement."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a regret run to those of `bench`."""
    group = parser.add_argument_group("regret")
    add_options(
        group,
        option("--regret", "N",
            "draw N calls, of every kind in turn, time each implementation that can run each, and "
            "print the default's time over the best one's", type=positive(int)),
        option("--seed", "S", "the seed of the draws", type=int, default=0),
        option("--kind", "GLOB", "only kinds named like this: 'mask_mod*'; may be repeated",
            dest="kinds", action="append"),
        option("--regret-of", "FILE",
            "time the calls of an earlier report again instead of drawing", type=Path),
        flag("--no-peers", "leave out jax.nn and tokamax as further columns"),
        option("--processes", "N", "processes that compile (default: half of the cores)",
            type=positive(int), default=max(1, (os.cpu_count() or 2) // 2)),
    )  # fmt: skip


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the options of `bench` ask for a regret run."""
    return args.regret is not None or args.regret_of is not None


def _calls_in(file: Path) -> list[TimedCall]:
    """The calls of a report.

    Raises:
      OSError: the file cannot be read, or is too large for a report.
      ValueError: it is no report.
    """
    try:
        rows = reading.json_file(file)
        return [TimedCall.from_json(x) for x in rows.get("calls") or rows["cells"]]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"--regret-of: expected a report of `bench --regret`, got {file}"
        ) from error


def run(args: argparse.Namespace, folder: Path) -> None:
    """Time the calls, save the report after each, and print the summary."""
    if args.regret_of is not None:
        calls = _calls_in(args.regret_of)[: args.regret]
    else:
        calls = drawn(args.regret, args.seed, args.kinds or ["*"])
    facts = environment()
    facts |= {"extras": dict(x for x in (flash.version(), fa4.version()) if x is not None)}
    facts |= {"seed": args.seed if args.regret_of is None else args.regret_of.name}
    extras = "".join(f"{name} {version}, " for name, version in facts["extras"].items())
    path = folder / f"{file_name(f'regret_{args.seed}', facts)}.json"
    print(f"{facts['device']}, {extras}cuDNN {facts['cudnn']}; {counted(len(calls), 'call')}")
    found = []
    for row in timed_rows(
        calls,
        processes=args.processes,
        seconds=args.seconds or _SECONDS,
        time_limit=args.time_limit or 3600.0,
        is_alone=args.no_peers,
    ):
        found.append(row)
        save(path, facts, found)
    for line in table(regrets(found)):
        print(line)
    print(f"{len(calls) - len(found)} calls were not timed; {path}")
