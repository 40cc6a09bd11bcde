"""A lock shared by processes, with a deadline for waiting."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Generator
from pathlib import Path

SECONDS = 10.0
"""The seconds to wait for a lock that another process holds."""

_LONGEST_SLEEP = 0.05


@contextlib.contextmanager
def locked(lock: Path, seconds: float = SECONDS) -> Generator[None]:
    """A block within which no other process, and no other thread, holds the lock.

    The operating system releases the lock when its holder ends, for whatever cause. On a file
    system without locks the block runs without one.

    Args:
      lock: a file beside what is locked; it is created if it is missing. It is neither read nor
        written, so its owner can do no more harm than to keep it locked.
      seconds: the longest wait.

    Raises:
      TimeoutError: another process held the lock all that time.
      OSError: the path is a link or no regular file, or cannot be opened.
    """
    handle = _opened(lock)
    try:
        _acquire(handle, lock, seconds)
        try:
            yield
        finally:
            # Without this, a child forked within the block would go on holding the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _opened(lock: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    no_file = "expected a file to lock, got a link, a folder, a pipe or a device"
    try:
        handle = os.open(lock, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise OSError(error.errno, no_file, str(lock)) from None
        raise
    facts = os.fstat(handle)
    # With a second name it might be a file that others lock for another purpose.
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(handle)
        raise OSError(errno.EINVAL, no_file, str(lock))
    return handle


def _acquire(handle: int, lock: Path, seconds: float) -> None:
    deadline, pause = time.monotonic() + seconds, 0.001
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if (left := deadline - time.monotonic()) <= 0:
                reason = f"another process has held this lock for {seconds:g} s"
                raise TimeoutError(errno.ETIMEDOUT, reason, str(lock)) from None
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_SLEEP)
        except OSError:
            return
