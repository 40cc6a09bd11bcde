"""A process that answers lines with lines, and how it ended if it does not."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO

_SAID_AT_LAST = 3
"""Lines of stderr that are told of a process that ended."""

_CHARACTERS = 1000
"""At most, of these lines."""


class HelperEnded(Exception):
    """The process ended, or was ended, before it answered: how, and what it said at last."""


class Helper:
    """One running process. It ends with this object, and with the process that started it.

    Not for several threads at once. A forked child must `abandon` it: the pipes are the parent's.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Raises HelperEnded if it cannot be started."""
        with ExitStack() as on_failure:
            try:
                said = on_failure.enter_context(tempfile.TemporaryFile())
                # In a session of its own, out of reach of the terminal's Ctrl-C.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, bufsize=0,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise HelperEnded(f"could not be started: {error}") from error
            on_failure.pop_all()
        self._said = said
        self._end = weakref.finalize(self, _end, self._process, said)

    def ask(self, line: bytes, timeout: float) -> bytes:
        """The line that answers this line; both end in a newline.

        Raises:
          HelperEnded: if the process ends, or does not answer in this many seconds and is ended.
        """
        try:
            return self._answer(line, timeout)
        except BaseException:
            # Whatever came between, KeyboardInterrupt too: a late answer would be the next line's.
            self.end()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether it has, before it was asked anything more."""
        return self._process.poll() is not None

    def end(self) -> None:
        self._end()

    def abandon(self) -> None:
        """Let go of it in a forked child, leaving it to the parent."""
        self._end.detach()
        self._process.returncode = 0  # not ours to wait for
        _close(self._process, self._said)

    def _answer(self, line: bytes, timeout: float) -> bytes:
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        deadline = time.monotonic() + timeout
        waiting = select.poll()
        waiting.register(answers, select.POLLIN)
        answer = b""
        try:
            while line:
                line = line[asked.write(line) :]
            while not answer.endswith(b"\n"):
                if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise HelperEnded(f"did not answer in {timeout:g} s")
                if not (part := answers.read(1 << 16)):
                    raise HelperEnded(self._how_it_ended())
                answer += part
        except (OSError, ValueError) as error:  # a broken pipe, or ended by another thread
            raise HelperEnded(self._how_it_ended()) from error
        return answer

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its output"
        how = f"ended with status {status}"
        if status < 0:
            how = f"was ended by signal {-status} ({signal.strsignal(-status)})"
        return how + self._said_at_last()

    def _said_at_last(self) -> str:
        if self._said.closed:
            return ""
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _CHARACTERS))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f", saying: {' / '.join(lines[-_SAID_AT_LAST:])}" if lines else ""


def _end(process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    process.kill()
    process.wait()
    _close(process, said)


def _close(process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    for file in (process.stdin, process.stdout, said):
        if file is not None:
            file.close()
