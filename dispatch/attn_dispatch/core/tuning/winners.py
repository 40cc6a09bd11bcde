"""The winners of tuning, in a file that people can read: by call, device and versions.

    {"format": 1, "winners": [{"call": {…}, "device": "NVIDIA H200", "versions": {…},
      "implementation": "cudnn", "engine": "6 KERNEL_CFG=2 STREAM_K=1", "date": "2026-11-24",
      "untuned": "cudnn", "microseconds": {"cudnn 6 KERNEL_CFG=2 STREAM_K=1": 512.3, …}}]}

The entry of a call does not contain facts that change no time, such as its scale. An entry counts
as long as the device has that name and the libraries have those versions. A file that cannot be
read gives no winners and a line in the log, and is not overwritten.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.files import reading, writing
from attn_dispatch.files.locking import locked
from attn_dispatch.files.reading import JsonObject
from attn_dispatch.files.user_folders import cache_path
from attn_dispatch.programs.program import ModProgram
from attn_dispatch.text import error_text

FILE = "ATTN_DISPATCH_WINNERS"
"""The environment variable that names the file; "off" keeps and reads none."""

_FORMAT = 1

_MAX_BYTES = 2**25
"""The largest file that is read or written. A winner takes 1 to 5 KB."""

_MAX_MICROSECONDS = 1e12
"""11 days. No contest takes so long, and a file with such a time is not read."""

_NOT_IN_FILE = ("scale", "needs_lse", "differentiated", "partner", "gradients")
"""Fields that change no time, or that `described` writes in another way."""

_log = logging.getLogger("attn_dispatch")

_not_kept: dict[Path, dict[str, Winner]] = {}
"""By file, the winners that this process could not write to it. This process still uses them, and
writes them together with the next winner that can be written."""


@dataclass(frozen=True)
class Winner:
    """The fastest way to compute one call on one device."""

    call: dict[str, object]
    """The call's spec, as `described` returns it."""
    device: str
    versions: dict[str, str]
    """The versions of everything that decided the choice."""
    implementation: str
    engine: str
    """`AttentionOptions.engine`; "" is the implementation's default."""
    date: str
    untuned: str
    """The contestant that runs the call if no winner is kept."""
    microseconds: dict[str, float]
    """Time of each contestant that was timed, fastest first, by its name."""

    @property
    def key(self) -> str:
        return _key(self.call, self.device, self.versions)

    def __str__(self) -> str:
        name, time = next(iter(self.microseconds.items()))
        beaten = [f"{x} {us:.1f}" for x, us in self.microseconds.items() if x != name]
        more = f", {len(beaten) - 3} more" if len(beaten) > 3 else ""
        others = f" ({', '.join(beaten[:3])}{more})" if beaten else ""
        return f"{name} {time:.1f} µs{others}, {self.date}"


def described(spec: AttentionSpec) -> dict[str, object]:
    """The facts that identify a call in the file."""
    arrays = {x.name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in spec.operands}
    found: dict[str, object] = {"pass": "backward" if spec.is_backward else "forward", **arrays}
    for part in (spec.meaning, spec.wanted):
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name not in _NOT_IN_FILE and value != field.default:
                # The text of a mod contains all its operations.
                is_mod = isinstance(value, ModProgram)
                found[field.name] = _digest(value.text) if is_mod else value
    if spec.is_backward:
        found["gradients"] = spec.wanted.gradients
    return json.loads(json.dumps(found))


def find(
    spec: AttentionSpec, device: Device, versions: Callable[[Device], Mapping[str, str]]
) -> Winner | None:
    """The kept winner of the call on this device, with these versions, if there is one."""
    if (file := winners_file()) is None:
        return None
    here, kept = _not_kept.get(file, {}), _kept(file) or {}
    if not here and not kept:
        return None
    call = described(spec)
    entries = (*here.values(), *kept.values())
    if not any(x.device == device.name and x.call == call for x in entries):
        return None  # without the versions: to learn that of cuDNN loads it
    key = _key(call, device.name, versions(device))
    return here.get(key) or kept.get(key)


def keep(winner: Winner) -> None:
    """Write the winner to the file, in place of an earlier winner of the same call.

    Raises:
      OSError: if it cannot be written. A file that cannot be read, or that another process has
        locked for seconds, is left as it is. This process still finds the winner, and writes it
        with the next one.
    """
    if (file := winners_file()) is None:
        return
    waiting = _not_kept.setdefault(file, {})
    waiting[winner.key] = winner
    written = dict(waiting)
    _add(file, written)
    for key, one in written.items():
        if waiting.get(key) is one:
            del waiting[key]


def not_kept(file: Path) -> int:
    """The number of winners of this process that could not be written to the file."""
    return len(_not_kept.get(file, {}))


def _add(file: Path, found: Mapping[str, Winner]) -> None:
    if reason := not_writable(file):
        raise OSError(reason)
    file = Path(os.path.realpath(file))  # a link stays: its target is replaced
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f".{file.name}.lock")):
        kept = _kept(file)
        if kept is None:
            raise OSError(f"{file} cannot be read as winners, and is left as it is")
        _replace(file, {**kept, **found})


def not_writable(file: Path) -> str:
    """Why winners cannot be kept in this file; empty if they can, as far as can be known."""
    try:
        if file.exists():
            return "" if file.is_file() else f"{file} is not a file that winners can be kept in"
        if file.is_symlink():
            file.stat()  # raises for a link to itself
    except FileNotFoundError:
        pass
    except OSError as error:
        return error_text(error)
    try:
        folder = next(x for x in file.absolute().parents if x.exists())
    except OSError as error:  # the current folder has been removed
        return f"{file}: {error_text(error)}"
    if folder.is_dir() and os.access(folder, os.W_OK):
        return ""
    return f"{folder} is not a folder that winners can be written to"


def winners_file() -> Path | None:
    """The file of winners, which need not exist; None if winners are not kept."""
    return cache_path(FILE, "winners.json")


def _kept(file: Path) -> dict[str, Winner] | None:
    """The winners in the file, by key; None if the file cannot be read."""
    try:
        facts = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError:
        return _read(file)
    return _read(file, facts.st_mtime_ns, facts.st_size, facts.st_ino)


@lru_cache(maxsize=4)
def _read(file: Path, *_: int) -> dict[str, Winner] | None:
    """The winners in the file, read once for each time, size and inode that it has."""
    try:
        content = reading.json_file(file, _MAX_BYTES, is_kept=True)
        if content["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, got {content['format']!r}")
        return {x.key: x for x in (_winner(entry) for entry in content["winners"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning(
            "%s: no winners are read: %s: %s", file, type(error).__name__, str(error)[:200]
        )
        return None


def _winner(entry: JsonObject) -> Winner:
    winner = Winner(**entry)
    for field in fields(Winner):
        value = getattr(winner, field.name)
        if not (_is_printable(value) if field.type == "str" else isinstance(value, dict)):
            raise ValueError(f"{field.name}: expected {field.type}, got {value!r}")
    times = winner.microseconds
    if not times or not all(_is_printable(x) and _is_time(y) for x, y in times.items()):
        raise ValueError(f"microseconds: expected numbers by names, got {times!r}")
    return winner


def _is_printable(text: object) -> bool:
    """Whether the text is a string that cannot control a terminal."""
    return isinstance(text, str) and text.isprintable()


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value < _MAX_MICROSECONDS


def _replace(file: Path, kept: Mapping[str, Winner]) -> None:
    listed = [asdict(x) for _, x in sorted(kept.items())]
    text = json.dumps({"format": _FORMAT, "winners": listed}, indent=1) + "\n"
    if len(text) > _MAX_BYTES:
        raise OSError(f"{file}: expected at most {_MAX_BYTES >> 20} MiB of winners, got more")
    mode = stat.S_IMODE(file.stat().st_mode) if file.exists() else None
    writing.replace(file, text.encode(), mode)
    writing.remove_stale(file.parent)


def _key(call: Mapping[str, object], device: str, versions: Mapping[str, str]) -> str:
    return json.dumps([call, device, dict(versions)], sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
