"""How a command ends: what it has said is out, and no traceback is left behind."""

from __future__ import annotations

import atexit
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attn_dispatch.text import error_text
from attn_dispatch_tools.terminal.text import filled

_INTERRUPTED = 128 + 2
_CUT_OFF = 128 + 13
"""What shells call a program that SIGINT or SIGPIPE ended."""


def run_process(command: Callable[[], object]) -> None:
    """`run_to_the_end` for a process that does nothing else."""
    try:
        run_to_the_end(command)
    except SystemExit as stop:
        if stop.code != _INTERRUPTED:
            raise
        # XLA that was interrupted while it compiled may crash when Python takes itself down.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(_INTERRUPTED)


@contextmanager
def dying_of_interrupts() -> Iterator[None]:
    """Within the block Ctrl-C ends the process at once, as it does any other program: C++ modules
    that are interrupted while they are imported tell of it by a traceback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield  # somebody has plans for it, or is not to be interrupted
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_to_the_end(command: Callable[[], object]) -> None:
    """Calls it. Ctrl-C and a reader that has had enough end the process as they end others; an
    error in words fits the terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # in a locale that lacks a letter, as "?"
    try:
        try:
            command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        if sys.stdout is not None:  # Python flushes it once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_CUT_OFF) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SystemExit(f"error: {error_text(error)}") from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None
    except SystemExit as stop:
        if isinstance(stop.code, str) and sys.stderr is not None and sys.stderr.isatty():
            raise SystemExit(filled(stop.code)) from None
        raise
