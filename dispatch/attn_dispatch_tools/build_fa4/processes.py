"""Running the programs of a build: what they print is shown only if they fail."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from attn_dispatch_tools.terminal.building import BuildError

_LAST_LINES = 30


def run(
    command: Sequence[str | Path],
    *,
    what: str,
    seconds: float,
) -> str:
    """Run a program to its end and return what it printed.

    Raises:
      BuildError: it cannot be started, fails, or takes longer. The message says what failed.
    """
    try:
        done = subprocess.run(
            [str(x) for x in command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{what} took longer than {seconds:.0f} s") from error
    except OSError as error:
        raise BuildError(f"{what} failed: {command[0]}: {error.strerror or error}") from error
    if done.returncode != 0:
        last = "\n".join(done.stdout.rstrip().splitlines()[-_LAST_LINES:])
        raise BuildError(f"{what} failed; its last lines are:\n{last}")
    return done.stdout
