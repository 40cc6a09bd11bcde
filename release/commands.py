"""Runs the README's commands as they are written, each in a fresh checkout.

usage: python release/commands.py [NAME …]

NAME is demo, serve, train, finetune, docs, test or test-older; the default is demo and test. The
measurements go into release/results/commands.json, which keeps earlier ones of other commands.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from environments import Failed, run
from plugins import BUILD, REPOSITORY
from record import RESULTS, commit, cpu_seconds, read, size_of

KEPT = RESULTS / "commands.json"
COMMANDS = ("demo", "serve", "train", "finetune", "docs", "test", "test-older")


@dataclass(frozen=True)
class Tried:
    state: str
    output: str
    """The last line that the command printed."""
    seconds: float
    cpu_seconds: float
    size: int
    """The size of the environment that the command made, in bytes."""
    python: str
    date: str
    commit: str


def try_command(name: str) -> Tried:
    """Run `make NAME` in a clone of the last commit."""
    source = BUILD / "clone"
    shutil.rmtree(source, ignore_errors=True)
    run("git", "clone", "--quiet", REPOSITORY, source)
    start, used, state = time.monotonic(), cpu_seconds(), "ok"
    try:
        output = run("make", name, cwd=source).strip().splitlines()[-1]
    except Failed as failure:
        state, output = "WRONG", str(failure).strip().splitlines()[-1]
    seconds, used = time.monotonic() - start, cpu_seconds() - used
    environment = source / ".venv"
    size, python = size_of(environment), _python(environment)
    shutil.rmtree(source)
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return Tried(state, output, round(seconds, 1), round(used, 1), size, python, day, commit())


def _python(environment: Path) -> str:
    python = environment / "bin" / "python"
    if not python.exists():
        return ""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["demo", "test"], help=", ".join(COMMANDS))
    names = parser.parse_args().names
    if unknown := set(names).difference(COMMANDS):
        parser.error(f"expected {', '.join(COMMANDS)}, got {', '.join(sorted(unknown))}")
    kept = read(KEPT) if KEPT.exists() else {}
    for name in names:
        kept[name] = asdict(tried := try_command(name))
        print(f"{tried.state:<5} make {name}: {tried.seconds} s; {tried.output}", flush=True)
        ordered = {x: kept[x] for x in COMMANDS if x in kept}
        KEPT.write_text(json.dumps(ordered, indent=1) + "\n")
    sys.exit(any(kept[x]["state"] != "ok" for x in names))


if __name__ == "__main__":
    main()
