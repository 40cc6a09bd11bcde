"""Files of machine code, judged before they are loaded: libraries, GPU kernels, saved plans.

The loader ends the process with SIGBUS over a library that is cut off, waits for ever at a pipe,
and runs what it loads, whoever wrote it.
"""

from __future__ import annotations

import os
import platform
import stat
import struct
from pathlib import Path

from attn_dispatch.environment import TRUST_FILES, flag

_HEADER = struct.Struct("<4s2s12xH12xQ14xHH6x")
"""The header of an ELF file: magic, class and byte order, machine, place of the table of segments,
bytes of an entry, number of entries."""
_SEGMENT = struct.Struct("<I4xQ16xQ16x")
"""An entry of that table: type, place in the file, bytes in the file."""
_MAGIC, _64_BITS_LITTLE_ENDIAN, _IS_MAPPED = b"\x7fELF", b"\x02\x01", 1
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MACHINES = {62: "x86_64", 183: "aarch64"}


def library_problem(path: str | os.PathLike[str], *, is_named: bool) -> str:
    """Why the loader must not open a library, as a sentence that begins with its path.

    Empty if it may, and if there is no file or no permission, for which the loader has a sentence.

    Args:
      path: the file; links are followed.
      is_named: whether a setting, or a folder of the user's that we write to, led to the file.
        Then no other user may be able to write it. Otherwise it is a part of this Python's
        packages or of the system: who can write there runs code here anyway.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return ""
    try:
        facts = os.fstat(opened)
        if not stat.S_ISREG(facts.st_mode):
            why = "is not a file"
        else:
            why = (untrusted(facts) if is_named else "") or _damage(opened, facts.st_size)
    finally:
        os.close(opened)
    return why and f"{os.fspath(path)} {why}"


def untrusted(facts: os.stat_result) -> str:
    """Why a file must not be run, as the end of a sentence: another user could have written it.

    The folder does not count: a file that another user puts there belongs to that user.
    """
    if flag(TRUST_FILES):
        return ""
    if facts.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {facts.st_uid} ({TRUST_FILES}=1 trusts it)"
    if facts.st_mode & _OTHERS_WRITE:
        return f"can be written by other users (`chmod go-w` ends that, {TRUST_FILES}=1 trusts it)"
    return ""


def deny_others(path: Path) -> None:
    """Take the permission to write from others, which a umask of 002 gives to a group."""
    path.chmod(path.stat().st_mode & ~_OTHERS_WRITE)


def _damage(opened: int, size: int) -> str:
    header = os.pread(opened, _HEADER.size, 0)
    if not header.startswith(_MAGIC):
        return "is not a library"
    if len(header) < _HEADER.size:
        return f"is cut off: it has {size} bytes"
    _, kind, machine, table, entry, number = _HEADER.unpack(header)
    made_for = _MACHINES.get(machine, f"ELF machine {machine}")
    if kind != _64_BITS_LITTLE_ENDIAN or made_for != platform.machine():
        return f"is for {made_for}: expected a library for {platform.machine()}"
    for i in range(number):
        segment = os.pread(opened, _SEGMENT.size, table + i * entry)
        if len(segment) < _SEGMENT.size:
            return f"is cut off: it has {size} bytes, and fewer than its {number} segments"
        is_mapped, place, length = _SEGMENT.unpack(segment)
        if is_mapped == _IS_MAPPED and place + length > size:
            return f"is cut off: it has {size} bytes, and segment {i} ends at {place + length}"
    return ""
