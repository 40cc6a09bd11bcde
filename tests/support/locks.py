"""Another process that holds a lock on a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HOLDER = (
    "import sys; from pathlib import Path; from attn_dispatch.files.locking import locked\n"
    "with locked(Path(sys.argv[1])):\n"
    "    print('locked', flush=True); sys.stdin.read()\n"
)


def holder(lock: Path) -> subprocess.Popen[bytes]:
    """Start a process that holds the lock until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"locked\n"
    return process
