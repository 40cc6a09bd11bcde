"""The end of a command: interrupted, with a closed pipe, a full disk, or a poor locale."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.files import user_folders
from attn_dispatch_tools.terminal.ending import dying_of_interrupts, run_to_the_end
from attn_dispatch_tools.terminal.folder import made_folder


def process(code: str, **how) -> subprocess.CompletedProcess[str]:
    """Run code in a process. Its function `command` stands in for the command, without JAX."""
    # A process that a shell starts in the background ignores SIGINT, and so do its children.
    before = "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    before += "from attn_dispatch_tools.terminal import ending\n"
    words = [sys.executable, "-c", before + textwrap.dedent(code)]
    return subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60, **how)


def test_an_interrupted_command_ends_with_status_130():
    done = process("""
        import atexit
        def command():
            print("half of it")
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10**9): pass
        atexit.register(print, "and its guests leave")
        ending.run_process(command)
    """, stdout=subprocess.PIPE)  # fmt: skip
    assert done.returncode == 130
    assert (done.stdout, done.stderr) == ("half of it\nand its guests leave\n", "interrupted\n")


def test_an_interrupt_during_imports_ends_the_process_by_the_signal():
    done = process("""
        def command():
            with ending.dying_of_interrupts():
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(10**9): pass
        ending.run_process(command)
    """)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""


def test_a_callers_handler_of_interrupts_is_kept():
    before = signal.getsignal(signal.SIGINT)
    handler = lambda *_: None  # noqa: E731
    try:
        signal.signal(signal.SIGINT, handler)
        with dying_of_interrupts():
            assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with dying_of_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("status", ["pass", "raise SystemExit(1)"])
@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_closed_pipe_ends_the_command_with_status_141(status: str, is_buffered: bool):
    """The status does not depend on the command's, nor on when the closed pipe is noticed."""
    read, write = os.pipe()
    os.close(read)
    code = f"""
        def command():
            print("x" * 10)
            {status}
        ending.run_process(command)
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "" if is_buffered else "1"}
    done = process(code, stdout=write, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_letters_that_the_locale_lacks_are_replaced():
    code = """
        print("\\u2026 \\u00b5s", file=sys.stderr)  # Python's own stderr escapes
        ending.run_process(lambda: print("3 \\u00b5s \\u2026"))
    """
    poor = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = process(code, stdout=subprocess.PIPE, env=os.environ | poor)
    assert (done.returncode, done.stdout) == (0, "3 ?s ?\n")


def test_a_command_runs_without_stdout():
    done = process("""
        os.close(1); sys.stdout = None
        ending.run_process(lambda: print("x"))
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_a_short_error_and_other_errors_are_raised():
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def other() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(SystemExit, match=r"^error: no space left on device$"):
        run_to_the_end(full)
    with pytest.raises(OSError, match="Errno 5"):
        run_to_the_end(other)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_error_fits_the_terminal(monkeypatch):
    def command() -> None:
        raise SystemExit("error: " + "word " * 30 + "\nsecond line")

    with pytest.raises(SystemExit) as piped:
        run_to_the_end(command)
    assert str(piped.value.code).count("\n") == 1, "a log gets the error in one line"
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "50")
    with pytest.raises(SystemExit) as shown:
        run_to_the_end(command)
    lines = str(shown.value.code).splitlines()
    assert max(map(len, lines)) <= 50 and lines[-1] == "second line" and len(lines) > 3


@pytest.fixture
def homeless(monkeypatch):
    """The platform finds no home folder: the user is not in /etc/passwd, and HOME is not set."""

    def unknown(*_, **__):
        raise RuntimeError("could not determine the home directory")

    for name in ("user_cache_path", "user_data_path"):
        monkeypatch.setattr(f"platformdirs.{name}", unknown)
    for name in ("ATTN_DISPATCH_PLANS", "ATTN_DISPATCH_AITER"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_home_there_are_no_cache_folders(homeless, monkeypatch):
    name = "ATTN_DISPATCH_PLANS"
    assert user_folders.cache_path(name, "plans") is None
    assert user_folders.why_no_cache_path(name) == f"you have no home folder, and no {name}"
    monkeypatch.setenv(name, "off")
    assert user_folders.why_no_cache_path(name) == f"{name}=off"
    assert aiter_folder.root().is_relative_to(sys.prefix)


def test_a_folder_that_cannot_be_made_is_an_error(monkeypatch, tmp_path):
    assert made_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out: expected a folder, got .*/file \(File exists\)"):
        made_folder(tmp_path / "file")
    with pytest.raises(ValueError, match=r"--out: expected a folder, got /proc/self \("):
        made_folder(Path("/proc/self"))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match=r"got \. \(No such file or directory\)"):
        made_folder(Path())
