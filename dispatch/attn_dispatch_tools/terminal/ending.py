"""How a command ends: its output is flushed, and expected errors print no traceback."""

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
"""The exit statuses that shells report for a program that SIGINT or SIGPIPE ended."""


def run_process(command: Callable[[], object]) -> None:
    """Run a command like `run_to_the_end`, in a process that does nothing else."""
    try:
        run_to_the_end(command)
    except SystemExit as stop:
        if stop.code != _INTERRUPTED:
            raise
        # If XLA was interrupted while compiling, it may crash when Python shuts down.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(_INTERRUPTED)


@contextmanager
def dying_of_interrupts() -> Iterator[None]:
    """Within this context Ctrl-C ends the process at once and silently.

    Otherwise, a C++ module that is interrupted while it is imported prints a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield  # other code handles the signal, or ignores it on purpose
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(command: Callable[[], object]) -> None:
    """Run the command, and write all its output; errors of writing are raised here, not at exit."""
    try:
        command()
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def run_to_the_end(command: Callable[[], object]) -> None:
    """Run a command, and end the process as users of a terminal expect.

    After Ctrl-C, or if the reader of its output is gone, the exit status is the usual one. Error
    messages are wrapped to the terminal's width.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # "?" for letters that the locale lacks
    try:
        _run(command)
    except BrokenPipeError:  # `| head` has read enough
        if sys.stdout is not None:  # Python flushes it again at exit, which must not fail
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
