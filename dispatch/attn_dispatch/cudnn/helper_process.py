"""A helper process that answers each line with a line, and the reason if it ends instead."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import IO

_LAST_LINES = 3
"""The number of lines of stderr that are quoted when the process has ended."""

_CHARACTERS = 1000
"""The most characters of these lines."""

_MAX_STDERR = 2**20
"""The most bytes of stderr that are kept: cuDNN may be set to log everything."""

_MAX_ANSWER = 2**26
"""The most bytes of an answer. A plan has some 200 KB."""

_PART = 1 << 16

_START_SECONDS = 60.0
"""The time for a process to start: its program's file may be on a disk that does not answer."""

_END_SECONDS = 5.0
"""The time for a killed process to end; one that waits for a disk takes longer."""


class HelperEnded(Exception):
    """The process ended, or was ended, before it answered; the message has its last output."""


class HelperSilent(HelperEnded):
    """The process was ended because it did not answer in time."""


class Helper:
    """One running process. It ends with this object, and with the process that started it.

    One thread may use it at a time. A forked child must `abandon` it, because the pipes are the
    parent's.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Raises HelperEnded if it cannot be started."""
        with ExitStack() as on_failure:
            try:
                stderr = on_failure.enter_context(tempfile.TemporaryFile())
                keeper = _Keeper(command, stderr)
                on_failure.callback(keeper.dismiss)
                self._process = keeper.started()
                for pipe in (self._process.stdin, self._process.stdout):
                    assert pipe is not None
                    os.set_blocking(pipe.fileno(), False)
            except (OSError, RuntimeError) as error:  # no process, or no thread
                raise HelperEnded(f"could not be started: {error}") from error
            on_failure.pop_all()
        self._stderr = stderr
        self._end = weakref.finalize(self, _end, self._process, stderr, keeper)

    def ask(self, line: bytes, timeout: float) -> bytes:
        """The line that answers this line; both end in a newline.

        Raises:
          HelperEnded: if the process ends.
          HelperSilent: if it does not answer in this many seconds, and is ended.
        """
        self._bound_stderr()
        try:
            return self._answer(line, timeout)
        except BaseException:
            # After any exception, even KeyboardInterrupt: a late answer would seem the next line's.
            self.end()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        self._end()

    def abandon(self) -> None:
        """Close the pipes in a forked child and leave the process to the parent."""
        self._end.detach()
        self._process.returncode = 0  # not ours to wait for
        _close(self._process, self._stderr)

    def _answer(self, line: bytes, timeout: float) -> bytes:
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None and answers is not None
        deadline = time.monotonic() + timeout
        waiting = select.poll()
        answer = bytearray()
        try:
            waiting.register(answers, select.POLLIN)
            waiting.register(questions, select.POLLOUT)
            while not answer.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not (ready := waiting.poll(left * 1000)):
                    raise HelperSilent(f"did not answer in {timeout:g} s")
                if (questions.fileno(), select.POLLOUT) in ready:
                    line = line[questions.write(line[:_PART]) or 0 :]
                    if not line:
                        waiting.unregister(questions)
                    continue
                if not (part := answers.read(_PART)):
                    raise HelperEnded(self._how_it_ended())
                answer += part
                if len(answer) > _MAX_ANSWER:
                    raise HelperEnded(f"answered more than {_MAX_ANSWER:,} bytes")
        except (OSError, ValueError) as error:  # a broken pipe, or ended by another thread
            raise HelperEnded(self._how_it_ended()) from error
        return bytes(answer)

    def _bound_stderr(self) -> None:
        if self._stderr.closed:
            return
        file = self._stderr.fileno()
        if os.lseek(file, 0, os.SEEK_CUR) > _MAX_STDERR:  # the position is shared with the process
            os.lseek(file, 0, os.SEEK_SET)
            os.ftruncate(file, 0)

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        how = f"ended with status {status}"
        if status < 0:
            how = f"was ended by signal {-status} ({signal.strsignal(-status)})"
        return how + self._last_lines()

    def _last_lines(self) -> str:
        if self._stderr.closed:
            return ""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _CHARACTERS))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"; its last output: {' / '.join(lines[-_LAST_LINES:])}" if lines else ""


class _Keeper:
    """The thread that starts a process and lives until it is dismissed.

    A process may ask the kernel to kill it when its parent ends, even while it is stopped. Its
    parent is then the thread that started it.
    """

    def __init__(self, command: Sequence[str], stderr: IO[bytes]) -> None:
        self._has_started = threading.Event()
        self._is_dismissed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        arguments = (command, stderr)
        threading.Thread(target=self._run, args=arguments, daemon=True).start()

    def started(self) -> subprocess.Popen[bytes]:
        """Raises OSError if it could not be started."""
        if not self._has_started.wait(_START_SECONDS):
            raise TimeoutError(f"not in {_START_SECONDS:g} s")
        if self._failure is not None:
            raise self._failure
        assert self._process is not None
        return self._process

    def dismiss(self) -> None:
        self._is_dismissed.set()

    def _run(self, command: Sequence[str], stderr: IO[bytes]) -> None:
        try:
            # In a new session, which the terminal's Ctrl-C does not reach.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._failure = error
            return
        except ValueError as error:  # `stderr` is closed: nothing waits for the process any more
            self._failure = OSError(str(error))
            return
        finally:
            self._has_started.set()
        self._is_dismissed.wait()
        self._process.kill()  # in case it started after the dismissal


def _end(process: subprocess.Popen[bytes], stderr: IO[bytes], keeper: _Keeper) -> None:
    process.kill()
    keeper.dismiss()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_SECONDS)
    _close(process, stderr)


def _close(process: subprocess.Popen[bytes], stderr: IO[bytes]) -> None:
    for file in (process.stdin, process.stdout, stderr):
        if file is not None:
            file.close()
