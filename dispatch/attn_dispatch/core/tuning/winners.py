"""What ran calls fastest, in a file that people can read: by call, device and versions.

    {"format": 1, "winners": [{"call": {…}, "device": "NVIDIA H200", "versions": {…},
      "implementation": "cudnn", "engine": "6 KERNEL_CFG=2 STREAM_K=1", "date": "2026-11-24",
      "untuned": "cudnn", "microseconds": {"cudnn 6 KERNEL_CFG=2 STREAM_K=1": 512.3, …}}]}

A scale is no part of the call, nor is whether lse is a result: they change no time. What stands in
the file is believed as long as the device has that name and the libraries those versions. From a
file that cannot be read nothing is taken, with a line in the log, and nothing is written over it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from attn_dispatch.call.spec import AttentionOptions, AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.settings import kept_at

FILE = "ATTN_DISPATCH_WINNERS"
"""The environment variable that names the file; "off" keeps and reads none."""

_FORMAT = 1

_NO_PART = (
    "operands", "scale", "engine", "needs_lse", "differentiated", "partner", "gradients",
)  # fmt: skip
"""Options that change no time, or are said otherwise."""

_log = logging.getLogger("attn_dispatch")


@dataclass(frozen=True)
class Winner:
    """What is kept of one call on one device."""

    call: dict[str, Any]
    """What `described` makes of its spec."""
    device: str
    versions: dict[str, str]
    """Of everything that had a part in the choice."""
    implementation: str
    engine: str
    """`AttentionOptions.engine`; "" is what the implementation takes by itself."""
    date: str
    untuned: str
    """The contestant that runs where nothing is kept."""
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


def described(spec: AttentionSpec) -> dict[str, Any]:
    """What tells a call from others in the file."""
    arrays = {x.name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in spec.operands}
    found: dict[str, Any] = {"pass": "backward" if spec.is_backward else "forward", **arrays}
    for field in fields(AttentionOptions):
        value = getattr(spec.options, field.name)
        if field.name not in _NO_PART and value != field.default:
            is_plain = isinstance(value, str | bool | int | float | tuple)
            # Of a mod all its operations, which its text has.
            found[field.name] = value if is_plain else _digest(value.text)
    if spec.is_backward:
        found["gradients"] = spec.options.gradients
    return json.loads(json.dumps(found))


def find(
    spec: AttentionSpec, device: Device, versions: Callable[[Device], Mapping[str, str]]
) -> Winner | None:
    """What ran the call fastest on this device, with these versions, if that is known."""
    file = winners_file()
    if file is None or not (kept := _kept(file)):
        return None
    return kept.get(_key(described(spec), device.name, versions(device)))


def keep(winner: Winner) -> None:
    """Write it down, in the place of what was kept of the same call.

    Raises:
      OSError: where that cannot be: what is there and cannot be read is left as it is.
    """
    if (file := winners_file()) is None:
        return
    if reason := not_writable(file):
        raise OSError(reason)
    file = file.resolve()  # of a link what it points to is replaced
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file):
        kept = _kept(file)
        if kept is None:
            raise OSError(f"{file} cannot be read as winners, and is left as it is")
        _replace(file, {**kept, winner.key: winner})


def not_writable(file: Path) -> str:
    """Why no winners can be kept there; empty if they can, as far as one can tell."""
    if file.exists():
        is_file = file.is_file()
        return "" if is_file else f"{file} is no file that winners can be kept in"
    folder = next(x for x in file.absolute().parents if x.exists())
    if folder.is_dir() and os.access(folder, os.W_OK):
        return ""
    return f"{folder} is no folder that winners can be written to"


def winners_file() -> Path | None:
    """Where winners are kept, which need not exist; None if they are not."""
    return kept_at(FILE, "winners.json")


def _kept(file: Path) -> dict[str, Winner] | None:
    """What the file holds, by key; None of one that cannot be read."""
    try:
        facts = file.stat()
    except OSError:
        return {}
    return _read(file, facts.st_mtime_ns, facts.st_size, facts.st_ino)


@lru_cache(maxsize=4)
def _read(file: Path, *_: int) -> dict[str, Winner] | None:
    """The same of a file with this time, size and number, so that each version is read once."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, got {content['format']!r}")
        return {x.key: x for x in (_winner(entry) for entry in content["winners"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("%s: no winners are read: %s: %s", file, type(error).__name__, error)
        return None


def _winner(entry: dict[str, Any]) -> Winner:
    winner = Winner(**entry)
    for field in fields(Winner):
        value = getattr(winner, field.name)
        kind = str if field.type == "str" else dict
        if not isinstance(value, kind):
            raise ValueError(f"{field.name}: expected {field.type}, got {value!r}")
    times = winner.microseconds
    if not times or not all(isinstance(x, int | float) for x in times.values()):
        raise ValueError(f"microseconds: expected numbers by names, got {times!r}")
    return winner


def _replace(file: Path, kept: Mapping[str, Winner]) -> None:
    text = json.dumps(
        {"format": _FORMAT, "winners": [asdict(x) for _, x in sorted(kept.items())]},
        indent=1,
        ensure_ascii=False,
    )
    handle, name = tempfile.mkstemp(prefix="begun-", dir=file.parent)
    try:
        with open(handle, "w", encoding="utf-8") as opened:
            opened.write(text + "\n")
            os.fchmod(handle, _mode(file))
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _mode(file: Path) -> int:
    """The file's own, that of a new file as the process makes them."""
    with contextlib.suppress(OSError):
        return stat.S_IMODE(file.stat().st_mode)
    os.umask(mask := os.umask(0))
    return 0o666 & ~mask


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """While no other process adds to the file, where the file system can say so."""
    with open(file.with_name(f".{file.name}.lock"), "w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _key(call: Mapping[str, Any], device: str, versions: Mapping[str, str]) -> str:
    return json.dumps([call, device, dict(versions)], sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
