"""The report of a module that needs a process with other devices."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.repository import ROOT, environment


def report_of(module: str, *arguments: str) -> Any:
    """The last line that a module prints, which is JSON."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
