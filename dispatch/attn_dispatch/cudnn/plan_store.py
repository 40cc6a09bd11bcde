"""A folder of plans shared by processes: what one has planned, the next one reads.

A file's name is a hash of everything that its plan depends on, and its first line is a checksum of
the rest. Files appear whole or not at all. A damaged file or folder costs a new planning and
nothing else. Plans are code, so none is read that another user could have written.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import stat
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from attn_dispatch.cudnn.call import Attributes
from attn_dispatch.cudnn.planning_process import PlanningProcess
from attn_dispatch.devices import code_files
from attn_dispatch.files import writing
from attn_dispatch.files.user_folders import cache_path

FOLDER = "ATTN_DISPATCH_PLANS"
"""The environment variable that names the folder; "off" saves no plans."""

MAX_FILES = 4096
"""The most files in the folder; the least recently used are removed. A plan has some 200 KB."""

_LARGEST = 2**26

_log = logging.getLogger("attn_dispatch")

_write_failures: dict[Path, str] = {}
"""Files that this process could not write, and why."""


def plan(
    backend: ModuleType | PlanningProcess, attributes: Attributes, properties: str
) -> tuple[str, int]:
    """`backend.plan`, from the folder if the plan is there: engine and workspace in bytes.

    Raises:
      CudnnError: as `backend.plan`; errors are not saved.
    """
    folder = plans_folder()
    if folder is None or backend.has_plan(attributes, properties):
        return backend.plan(attributes, properties)
    key = backend.plan_key(attributes, properties)
    file = _file(folder, key)
    if (line := _read(file)) is not None:
        try:
            backend.import_plan(attributes, properties, line)
            if isinstance(backend, ModuleType):
                _replace_remade_at_exit(backend)
        except backend.CudnnError as error:
            _log.debug("%s: planned anew: %s", file, error)
            line = None
    found = backend.plan(attributes, properties)
    if line is None:
        _write(file, backend.export_plan(attributes, properties))
    return found


def plans_folder() -> Path | None:
    """The folder for plans, which need not exist; None if plans are not saved."""
    return cache_path(FOLDER, "plans")


def write_failures(folder: Path) -> list[str]:
    """Why plans of this process could not be written to the folder, one sentence for each cause."""
    reasons = (reason for file, reason in _write_failures.items() if file.parent == folder)
    return list(dict.fromkeys(reasons))


def replace_remade(backend: ModuleType) -> None:
    """Replace those plans in the folder that did not load on a device and were planned again."""
    if (folder := plans_folder()) is None:
        return
    with contextlib.suppress(backend.CudnnError):
        for key, line in backend.take_remade_plans().items():
            _write(_file(folder, key), line)


@lru_cache
def _replace_remade_at_exit(backend: ModuleType) -> None:
    atexit.register(replace_remade, backend)


def _file(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.plan"


def _read(file: Path) -> str | None:
    """The plan in the file; None if the file is missing, damaged or not to be trusted."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            facts = os.fstat(opened.fileno())
            is_file = stat.S_ISREG(facts.st_mode)
            if reason := code_files.untrusted(facts) if is_file else "is no file":
                _log.debug("%s: planned anew: it %s", file, reason)
                return None
            checksum, _, line = opened.read(_LARGEST).partition(b"\n")
        if checksum != _checksum(line):
            _log.debug("%s: planned anew: it is damaged", file)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # it has been used
        return line.decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _log.debug("%s: planned anew: %s", file, error)
        return None


def _write(file: Path, line: str) -> None:
    content = line.encode()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        writing.replace(file, _checksum(content) + b"\n" + content, mode=0o600)
    except OSError as error:
        _write_failures[file] = str(error.strerror or error)
        _log.debug("%s: not kept: %s", file, error)
        return
    _write_failures.pop(file, None)
    _bound(file)


def _bound(kept: Path) -> None:
    """Remove the least recently used plans if there are too many, and unfinished files.

    The file just written stays. Several processes may do this at once, so any file may be gone. If
    there are too many an eighth is removed, so that this does not happen at every write.
    """
    plans = [x for x in writing.remove_stale(kept.parent) if x.endswith(".plan") and x != kept.name]
    if len(plans) < MAX_FILES:
        return
    plans.sort(key=lambda name: _last_used(kept.with_name(name)))
    for name in plans[: len(plans) + 1 - MAX_FILES * 7 // 8]:
        with contextlib.suppress(OSError):
            os.unlink(kept.with_name(name))


def _last_used(file: Path) -> float:
    try:
        return file.lstat().st_mtime
    except OSError:
        return 0.0


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
