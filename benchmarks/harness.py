"""What the scripts share: their options, programs that take turns, and the report."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch.core.tuning.timing import JittedCall, seconds_per_call, turns
from attn_dispatch_tools.bench.device_time import busy_seconds
from attn_dispatch_tools.reports.environment import environment, file_name


class Script:
    """A script's options, and its report, which is saved after each row.

    Args:
      kind: the first part of the name of the report's file.
      text: the script's docstring, for --help.
      rounds, seconds: the defaults of options; a script without one has no such option.
    """

    def __init__(
        self, kind: str, text: str | None, *, rounds: int = 0, seconds: float = 0.0
    ) -> None:
        self._kind = kind
        self.parser = argparse.ArgumentParser(
            description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if rounds:
            self.parser.add_argument("--rounds", type=int, default=rounds)
        if seconds:
            self.parser.add_argument(
                "--seconds", type=float, default=seconds, help="length of one measurement"
            )
        self.parser.add_argument(
            "--only", action="append", metavar="GLOB", help="rows named like this; may be repeated"
        )
        self.parser.add_argument("--out", type=Path, help="folder for the JSON")
        self.report: dict[str, Any] = {}

    def start(self, **facts: Any) -> argparse.Namespace:
        """Parse the options, and print where this runs. `facts` are part of the environment."""
        self._args = self.parser.parse_args()
        found = self.report["environment"] = environment() | facts
        print(f"{found['device']}, cuDNN {found['cudnn']}, JAX {found['jax']}", flush=True)
        return self._args

    def chosen(self, names: Iterable[str], default: str = "*") -> Iterator[str]:
        """The rows that --only names, or else `default`. Ends the script if there are none."""
        every, globs = [*names], self._args.only or [default]
        found = [x for x in every if any(fnmatch(x, glob) for glob in globs)]
        if not found:
            self.parser.error(f"--only: expected a glob for one of {', '.join(every)}; got {globs}")
        return iter(found)

    def keep(self, part: str, name: str, row: Mapping[str, Any]) -> None:
        """Add a row to a part of the report, print it and save the report."""
        self.report.setdefault(part, {})[name] = row
        lines = (f"{x} {_text(y)}" for x, y in row.items())
        nested = any(isinstance(x, dict) for x in row.values())
        print(f"{name}:", *lines, sep="\n    " if nested else "  ", flush=True)
        if folder := self._args.out:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{file_name(self._kind, self.report['environment'])}.json"
            path.write_text(json.dumps(_rounded(self.report), indent=1) + "\n")


def normal(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    """Normally distributed arrays of these shapes."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, x, dtype) for key, x in zip(keys, shapes, strict=True)]


def compared(
    programs: Mapping[str, JittedCall],
    args: argparse.Namespace,
    beside: Mapping[str, str],
    least: int = 10,
) -> dict[str, dict[str, Any]]:
    """By program, a call's "us", and its time "over" that of the program that `beside` names for
    it: medians over the rounds, in which all take turns, each of `least` calls or more."""
    timed = {name: partial(seconds_per_call, *program) for name, program in programs.items()}
    times = turns(timed, args.rounds, args.seconds, least=least)
    found: dict[str, dict[str, Any]] = {
        name: {"us": 1e6 * statistics.median(x)} for name, x in times.items()
    }
    for name, other in beside.items():
        if name in times and other in times:
            ratios = (x / y for x, y in zip(times[name], times[other], strict=True))
            found[name] |= {"over": statistics.median(ratios), "beside": other}
    return found


def device_us(run: Callable[[], object]) -> float | None:
    """The microseconds for which kernels run; None where no profile says so."""
    found, _ = busy_seconds(lambda: jax.block_until_ready(run()))
    return None if found is None else 1e6 * found


def _text(x: Any) -> str:
    if isinstance(x, Mapping):
        return ", ".join(f"{name} {_text(y)}" for name, y in x.items())
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def _rounded(x: Any) -> Any:
    """The same with numbers of six digits."""
    if isinstance(x, Mapping):
        return {name: _rounded(y) for name, y in x.items()}
    if isinstance(x, list | tuple):
        return [_rounded(y) for y in x]
    return float(f"{x:.6g}") if isinstance(x, float) else x
