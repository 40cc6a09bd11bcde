"""Imports of a C++ module by a second interpreter of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_INNER = """
from importlib import util
spec = util.spec_from_file_location({name!r}, {path!r})
try:
    spec.loader.exec_module(util.module_from_spec(spec))
except ImportError as error:
    print(error, flush=True)
else:
    print("it was imported", flush=True)
"""
_OUTER = """
import sys
if sys.version_info >= (3, 13):
    import _interpreters as interpreters
    kind = {"config": "legacy"}  # the kind that may import what makes no promises
else:
    import _xxsubinterpreters as interpreters
    kind = {"isolated": False}
interpreters.run_string(interpreters.create(**kind), sys.argv[1])
"""


def import_error(name: str, path: Path) -> str:
    """What the import says; the process is new, and its time is limited."""
    command = [sys.executable, "-c", _OUTER, _INNER.format(name=name, path=str(path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout
