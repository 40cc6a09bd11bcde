"""Files that commands cannot read or write: the error is one line with the name of the file."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from attn_dispatch_tools import cli

READERS = (
    ("explain", "FILE"),
    ("plan", "FILE", "--target", "h200"),
    ("tune", "FILE"),
    ("verify", "--plot", "FILE"),
    ("verify", "--repeat", "FILE"),
    ("bench", "--plot", "FILE"),
    ("explain", "q=f32[1,8,1,4]", "--target", "FILE"),
)
"""Commands that read a file."""


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_PLANS", str(tmp_path / "plans"))
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path / "winners.json"))


def error_of(*words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*words])
    assert isinstance(stopped.value.code, str) and stopped.value.code.startswith("error: ")
    return stopped.value.code


@pytest.mark.parametrize("words", READERS, ids=lambda x: " ".join(x[:2]))
@pytest.mark.parametrize(
    "kind", ["folder", "pipe", "device", "loop", "huge", "nested", "not UTF-8", "empty", "below"]
)
def test_a_file_that_cannot_be_read_is_an_error_of_one_line(words, kind, tmp_path):
    file = tmp_path / "file.json"
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind in ("device", "loop"):
        file.symlink_to("/dev/zero" if kind == "device" else file)
    elif kind == "huge":
        with open(file, "wb") as opened:
            opened.truncate(2**40)
    elif kind == "below":
        file.touch()
        file = file / "file.json"
    else:
        file.write_bytes({"nested": b"[" * 10**6, "not UTF-8": b"\xff", "empty": b""}[kind])
    message = error_of(*(x.replace("FILE", str(file)) for x in words))
    assert str(file) in message and "\n" not in message and len(message) < 1000
    assert "Errno" not in message and "Traceback" not in message


WRITERS = (
    ("mask", "--seq", "4", "--out", "FOLDER/mask.svg"),
    ("verify", "--cases", "window/*", "--implementation", "xla", "--out", "FOLDER/new"),
    ("bench", "--out", "FOLDER/new"),
    ("build-aiter", "--arch", "gfx942", "--out", "FOLDER/new"),
)
"""Commands that write into a folder, which exists or must be made."""

_WITHOUT_PRIVILEGES = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: root may read and write anything
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, "-m", "attn_dispatch", *sys.argv[1:]])
"""


def unprivileged(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the privileges of root, so that permissions apply."""
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_PRIVILEGES, *words],
        capture_output=True, text=True, timeout=120, env=os.environ | variables,
    )  # fmt: skip


@pytest.mark.parametrize("words", WRITERS[:3], ids=lambda x: x[0])
def test_a_read_only_folder_is_an_error(words, tmp_path):
    folder = tmp_path / "read only"
    folder.mkdir()
    folder.chmod(0o555)
    done = unprivileged(*(x.replace("FOLDER", str(folder)) for x in words))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and "ermission denied" in done.stderr
    assert str(folder) in done.stderr


def test_files_in_a_folder_without_permission_are_errors(tmp_path):
    """The folder may not be searched, so that its files cannot be opened."""
    folder = tmp_path / "private"
    folder.mkdir()
    for name in ("calls.json", "h200.json", "winners.json"):
        (folder / name).write_text("[]")
    folder.chmod(0o600)
    call = "q=f32[1,8,1,4]"
    for words, variables in (
        (("explain", str(folder / "calls.json")), {}),
        (("explain", call, "--target", str(folder / "h200.json")), {}),
        (("tune", str(folder / "calls.json")), {}),
        (("plan", str(folder / "calls.json")), {}),
    ):
        done = unprivileged(*words, **variables)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert "permission denied" in done.stderr and str(folder) in done.stderr
    done = unprivileged("explain", call, ATTN_DISPATCH_WINNERS=str(folder / "winners.json"))
    assert done.returncode == 0 and "no winners are read" in done.stderr


@pytest.mark.parametrize("words", WRITERS, ids=lambda x: x[0])
def test_a_file_in_place_of_a_folder_is_an_error(words, tmp_path):
    (tmp_path / "file").touch()
    message = error_of(*(x.replace("FOLDER", str(tmp_path / "file")) for x in words))
    assert str(tmp_path / "file") in message and "Errno" not in message


def test_build_aiter_reports_paths_that_are_loops(monkeypatch, tmp_path):
    """The error is a sentence, not a traceback."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert error_of("build-aiter", "--arch", "gfx942", "--out", str(tmp_path / "loop" / "x"))
    monkeypatch.setenv("ATTN_DISPATCH_AITER_WHEEL", str(tmp_path / "loop"))
    assert "ATTN_DISPATCH_AITER_WHEEL" in error_of("build-aiter", "--arch", "gfx942")


def test_a_full_disk_leaves_the_earlier_report(tmp_path, monkeypatch):
    from attn_dispatch_tools.verify.report import Report

    facts = {"device": "CPU", "cudnn": "none"}
    report = Report(facts, "xla", {}, (), 1.0)
    paths = report.write(tmp_path)
    before = [x.read_bytes() for x in paths]
    larger = Report(facts | {"notes": "x" * 2**17}, "xla", {}, (), 1.0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            larger.write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [x.read_bytes() for x in paths] == before and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("command", ["info", "explain", "mask", "verify", "bench", "plan", "tune"])
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ATTN_DISPATCH_TARGET", "h210"),
        ("ATTN_DISPATCH_FALLBACK", "x"),
        ("ATTN_DISPATCH_TUNING", "x"),
        ("ATTN_DISPATCH_CHECK", "yes"),
        ("ATTN_DISPATCH_TRUST_FILES", "true"),
        ("ATTN_DISPATCH_POISON", "2"),
    ],
)
def test_a_wrong_value_of_a_variable_is_an_error_of_every_command(
    command, variable, value, monkeypatch, tmp_path
):
    monkeypatch.setenv(variable, value)
    calls = Path(tmp_path, "calls.json")
    calls.write_text("[]")
    words = {"explain": ("q=f32[1,8,1,4]",), "mask": ("--seq", "4"), "verify": ("--list",)}
    message = error_of(
        command, *words.get(command, (str(calls),) if command in ("plan", "tune") else ())
    )
    assert "expected" in message and value in message


def test_completion_ignores_wrong_settings(monkeypatch, capsys):
    monkeypatch.setenv("ATTN_DISPATCH_FALLBACK", "x")
    cli.main(["completion", "bash"])
    assert "attn-dispatch" in capsys.readouterr().out
