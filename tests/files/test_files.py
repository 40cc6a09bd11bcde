"""Files: reading has limits, writing replaces a file atomically, and locks have a deadline."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from attn_dispatch.files import locking, reading, writing
from attn_dispatch.files.locking import locked
from tests.support.locks import holder


def test_a_file_is_read_whole_up_to_its_limit(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to(file)
    assert reading.contents(file, 100) == reading.contents(tmp_path / "link", 100) == b"x" * 100
    with pytest.raises(OSError, match="expected at most 99 bytes, got more") as raised:
        reading.contents(file, 99)
    assert raised.value.filename == str(file)


def test_a_huge_file_is_not_read(tmp_path):
    file = tmp_path / "sparse"
    with open(file, "wb") as opened:
        opened.truncate(2**40)
    with pytest.raises(OSError, match="expected at most 16 MiB, got more"):
        reading.contents(file)


@pytest.mark.parametrize("kept", [True, False])
def test_folders_pipes_and_devices_do_not_block_reading(tmp_path, kept, monkeypatch):
    """Reading does not wait: a pipe without a writer is empty, and a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(reading, "SECONDS", 0.1)
    with pytest.raises(IsADirectoryError, match="expected a file, got a folder"):
        reading.contents(tmp_path, is_kept=kept)
    if kept:
        for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
            with pytest.raises(OSError, match="expected a file, got a pipe or a device"):
                reading.contents(path, is_kept=True)
    else:
        assert reading.contents(tmp_path / "pipe") == reading.contents(Path("/dev/null")) == b""
        with pytest.raises(OSError, match="expected at most 16 MiB, got more"):
            reading.contents(Path("/dev/zero"))


def test_a_pipe_is_read_to_its_end_and_a_silent_one_times_out(tmp_path, monkeypatch):
    """`attn-dispatch plan <(make_calls)` reads a pipe, as does /dev/stdin."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = os.open(pipe, os.O_RDWR)

    def write() -> None:
        for _ in range(50):
            os.write(opened, b"x" * 10_000)
            time.sleep(0.001)
        os.close(opened)

    writer = threading.Thread(target=write)
    writer.start()
    assert reading.contents(pipe) == b"x" * 500_000
    writer.join()
    opened = os.open(pipe, os.O_RDWR)
    monkeypatch.setattr(reading, "SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"expected its end within 0\.1 s"):
        reading.contents(pipe)
    os.close(opened)
    code = "from attn_dispatch.files import reading; from pathlib import Path\n"
    code += "print(len(reading.contents(Path('/dev/stdin'))))"
    done = subprocess.run([sys.executable, "-c", code], input=b"y" * 70_000, capture_output=True)
    assert done.stdout == b"70000\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff", "expected UTF-8, got byte 0xff at 0"),
        (b"{", "expected JSON, got Expecting property name"),
        (b"", "expected JSON, got nothing"),
        (b"[" * 100_000, "expected JSON, got more than 100 levels of brackets"),
        (b"[" * 101 + b"]" * 101, "expected JSON, got more than 100 levels of brackets"),
        (b'{"a": ' * 200 + b"1" + b"}" * 200, "got more than 100 levels of brackets"),
        (b"1" * 5000, "expected JSON, got Exceeds the limit"),
        (b'[{"a": 1, "b": {"c": 2, "d": 3, "c": 2}}]', "expected JSON, got 'c' twice in one ob"),
    ],
)
def test_invalid_json_is_refused_with_the_reason(tmp_path, content, reason):
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as raised:
        reading.json_file(file)
    assert str(file) in str(raised.value)


def test_json_is_read_as_utf_8(tmp_path):
    (tmp_path / "file.json").write_text('{"a": [1, "µ"]}' + "\n", encoding="utf-8")
    assert reading.json_file(tmp_path / "file.json") == {"a": [1, "µ"]}
    assert reading.json_value("[" * 100 + "]" * 100)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_of_the_umask(tmp_path, mask, monkeypatch):
    """os.umask is not called, since it would change the umask for other threads."""
    before = os.umask(mask)
    try:
        with monkeypatch.context() as patched:
            patched.delattr(os, "umask")
            writing.replace(tmp_path / "new", b"1")
            writing.replace(tmp_path / "open", b"1", 0o666)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o666
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """The limit of 64 KiB for a file makes the write fail halfway."""
    file = tmp_path / "file"
    file.write_text("before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            writing.replace(file, b"x" * 2**17)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(file))
    assert [x.name for x in tmp_path.iterdir()] == ["file"] and file.read_text() == "before"


def test_a_process_killed_while_writing_leaves_a_complete_file(tmp_path):
    file = tmp_path / "file"
    code = (
        "import sys; from pathlib import Path; from attn_dispatch.files import writing\n"
        "file, number = Path(sys.argv[1]), 0\n"
        "while True:\n"
        "    writing.replace(file, b'%d' % number * 200_000)\n"
        "    number = (number + 1) % 10\n"
    )
    for pause in (0.0, 0.003, 0.011):
        process = subprocess.Popen([sys.executable, "-c", code, str(file)])
        while not file.exists():
            time.sleep(0.01)
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.wait()
        content = file.read_bytes()
        assert len(content) == 200_000 and len(set(content)) == 1
        file.unlink()
    for begun in tmp_path.iterdir():
        os.utime(begun, (1, 1))
    writing.remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_unfinished_files_are_removed_after_an_hour(tmp_path):
    names = [f"begun-{'0' * 16}", f"begun-{'1' * 16}", "begun-notes", "plan"]
    for name in names:
        (tmp_path / name).touch()
    for name in names[1:]:
        os.utime(tmp_path / name, (1, 1))
    assert sorted(writing.remove_stale(tmp_path)) == sorted(names)
    assert {x.name for x in tmp_path.iterdir()} == {names[0], *names[2:]}
    assert writing.remove_stale(tmp_path / "nowhere") == []


def test_a_lock_held_by_another_process_times_out(tmp_path):
    lock = tmp_path / "lock"
    process = holder(lock)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"held this lock for 0\.2 s") as raised:
        with locked(lock, 0.2):
            raise AssertionError
    assert 0.2 <= time.monotonic() - start < 5 and raised.value.filename == str(lock)
    process.communicate(timeout=60)
    with locked(lock, 0.2):
        pass


def test_a_lock_of_a_killed_process_can_be_taken(tmp_path):
    lock = tmp_path / "lock"
    process = holder(lock)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        with locked(lock, 0.1):
            raise AssertionError
    process.kill()
    process.communicate(timeout=60)
    with locked(lock, 5.0):
        pass


def test_threads_take_a_lock_one_at_a_time(tmp_path):
    inside, max_inside = [0], [0]

    def enter() -> None:
        for _ in range(10):
            with locked(tmp_path / "lock"):
                inside[0] += 1
                max_inside[0] = max(max_inside[0], inside[0])
                time.sleep(0.0005)
                inside[0] -= 1

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max_inside == [1]


FORK_INSIDE_LOCK = (
    "import os, sys, time; from pathlib import Path\n"
    "from attn_dispatch.files.locking import locked\n"
    "with locked(Path(sys.argv[1])):\n"
    "    child = os.fork()\n"
    "    if child == 0: time.sleep(60); os._exit(0)\n"
    "with locked(Path(sys.argv[1]), 1.0): pass\n"
    "os.kill(child, 9); print('taken again')\n"
)


def test_a_child_forked_inside_a_lock_does_not_keep_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_INSIDE_LOCK, str(tmp_path / "lock")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "taken again\n", done.stderr


@pytest.mark.parametrize("kind", ["link", "hard link", "dangling", "pipe", "folder", "device"])
def test_a_lock_that_is_no_regular_file_is_refused(tmp_path, kind):
    """Another user's link must not make this process touch a file of this user."""
    lock, precious = tmp_path / "lock", tmp_path / "precious"
    precious.write_text("precious")
    make = {
        "link": lambda: lock.symlink_to(precious),
        "hard link": lambda: lock.hardlink_to(precious),
        "dangling": lambda: lock.symlink_to(tmp_path / "nowhere"),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
        "device": lambda: lock.symlink_to("/dev/zero"),
    }
    make[kind]()
    with pytest.raises(OSError, match="expected a file to lock, got a link, a folder") as raised:
        with locked(lock, 0.1):
            raise AssertionError
    assert raised.value.filename == str(lock)
    assert precious.read_text() == "precious" and not (tmp_path / "nowhere").exists()


def test_locking_does_not_change_the_file(tmp_path):
    lock = tmp_path / "lock"
    lock.write_text("a note")
    with locked(lock):
        pass
    assert lock.read_text() == "a note"


def test_a_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    def none(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locking.fcntl, "flock", none)
    with locked(tmp_path / "lock"):
        pass
