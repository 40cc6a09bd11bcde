"""The file of winners under interference: locks, links, pipes, sizes and foreign contents."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from attn_dispatch.core import select
from attn_dispatch.core.tuning import winners
from attn_dispatch.core.tuning.winners import Winner
from attn_dispatch.devices.target import CPU
from attn_dispatch.files import reading
from attn_dispatch.files.locking import locked
from attn_dispatch.inspection import spec_of
from tests.support.locks import holder
from tests.support.repository import ROOT

Q = jax.ShapeDtypeStruct((2, 48, 4, 16), jnp.float32)
SPEC = spec_of(query=Q, key=Q, value=Q, is_causal=True)
WINNER = Winner(
    call=winners.described(SPEC), device=CPU.name, versions=select.versions(CPU),
    implementation="xla", engine="", date="2026-11-26", untuned="xla", microseconds={"xla": 1.5},
)  # fmt: skip


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(winners.FILE, str(tmp_path / "winners.json"))
    monkeypatch.setattr(winners, "locked", partial(locked, seconds=0.2))
    monkeypatch.setattr(winners, "_not_kept", {})
    return tmp_path / "winners.json"


def in_file(file: Path) -> list[str]:
    """The devices whose winners the file holds."""
    return sorted(x["device"] for x in json.loads(file.read_text())["winners"])


def test_lock_held_by_another_process_loses_no_winners(file):
    """The file keeps its winners, and this process adds its unwritten ones with the next one."""
    winners.keep(WINNER)
    process = holder(file.with_name(".winners.json.lock"))
    other = replace(WINNER, implementation="cudnn")
    with pytest.raises(TimeoutError, match=r"held this lock for 0\.2 s"):
        winners.keep(other)
    assert winners.not_kept(file) == 1
    assert winners.find(SPEC, CPU, select.versions) == other
    assert in_file(file) == [CPU.name]
    with pytest.raises(TimeoutError):
        winners.keep(replace(WINNER, device="b"))
    process.communicate(timeout=60)
    winners.keep(replace(WINNER, device="c"))
    assert winners.not_kept(file) == 0 and in_file(file) == [CPU.name, "b", "c"]
    assert winners.find(SPEC, CPU, select.versions) == other


@pytest.mark.parametrize("exists", [True, False])
def test_lock_does_not_write_through_a_link(file, tmp_path, exists):
    target = tmp_path / "target"
    if exists:
        target.write_text("precious")
    file.with_name(".winners.json.lock").symlink_to(target)
    with pytest.raises(OSError, match="expected a file to lock, got a link"):
        winners.keep(WINNER)
    assert not file.exists() and winners.not_kept(file) == 1
    assert target.read_text() == "precious" if exists else not target.exists()


def test_keeping_a_winner_does_not_change_the_umask(file, monkeypatch):
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.delattr(os, "umask")
            winners.keep(WINNER)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o640


def test_full_disk_keeps_the_old_file(file):
    winners.keep(WINNER)
    content, before = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content), before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            winners.keep(replace(WINNER, device="other"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_bytes() == content and winners.not_kept(file) == 1
    assert not list(file.parent.glob("begun-*"))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "nowhere"])
def test_path_that_is_no_regular_file_is_not_read_or_written(file, kind, caplog):
    make = {
        "pipe": lambda: os.mkfifo(file),
        "device": lambda: file.symlink_to("/dev/zero"),
        "folder": file.mkdir,
        "loop": lambda: file.symlink_to(file),
        "nowhere": lambda: file.symlink_to("nowhere.json"),
    }
    make[kind]()
    with caplog.at_level(logging.WARNING, "attn_dispatch"):
        assert winners.find(SPEC, CPU, select.versions) is None
    if kind == "nowhere":
        winners.keep(WINNER)
        assert in_file(file.with_name("nowhere.json")) == [CPU.name]
        return
    assert "no winners are read" in caplog.text
    with pytest.raises(OSError):
        winners.keep(WINNER)
    assert winners.find(SPEC, CPU, select.versions) == WINNER, "this process remembers it"


def test_file_above_the_size_limit_is_not_read_or_written(file, monkeypatch, caplog):
    """Not even a part of the file is read."""
    with open(file, "w") as opened:
        opened.truncate(2**40)
    assert winners.find(SPEC, CPU, select.versions) is None
    assert "expected at most 32 MiB, got more" in caplog.text
    file.unlink()
    winners.keep(WINNER)
    monkeypatch.setattr(winners, "_MAX_BYTES", 2 * file.stat().st_size)
    content = file.read_bytes()
    with pytest.raises(OSError, match="MiB of winners, got more"):
        winners.keep(replace(WINNER, device="x" * len(content)))
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    "field",
    [
        {"device": "\ud800"},
        {"engine": "\x1b[2J"},
        {"date": "2026\n"},
        {"untuned": 3},
        {"versions": []},
        {"call": None},
        {"microseconds": {}},
        {"microseconds": {"xla": float("nan")}},
        {"microseconds": {"xla": 10**400}},
        {"microseconds": {"xla": -1.0}},
        {"microseconds": {"xla": True}},
        {"microseconds": {"\x1b": 1.0}},
    ],
)
def test_foreign_contents_are_reported_and_ignored(file, field, caplog):
    content = {"format": 1, "winners": [asdict(WINNER) | field]}
    file.write_text(json.dumps(content))
    assert winners.find(SPEC, CPU, select.versions) is None
    assert f"{next(iter(field))}: expected " in caplog.text
    assert len(caplog.text) < 1000


def test_names_beyond_ascii_are_written_and_found(file):
    winner = replace(WINNER, engine="µ", call=WINNER.call | {"\ud800": "\udfff"})
    winners.keep(winner)
    assert winners._kept(file) == {winner.key: winner}


KEEPS_WINNERS = """
import sys
from dataclasses import replace
from attn_dispatch.core.tuning import winners
sys.path.insert(0, sys.argv[1])
from tests.core.tuning.test_winners_file import WINNER
print("ready", flush=True)
for number in range(10**6):
    winners.keep(replace(WINNER, device=f"{sys.argv[2]} {number}"))
"""


def test_killed_process_leaves_a_whole_file_and_no_lock(file):
    """The next process gets the lock at once and finds a whole file with all earlier winners."""
    command = [sys.executable, "-c", KEEPS_WINNERS, str(ROOT)]
    count = 0
    for number, pause in enumerate((0.1, 0.103, 0.107)):
        process = subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        winners.keep(replace(WINNER, device=f"after {number}"))
        devices = in_file(file)
        assert len(devices) > count and f"after {number}" in devices
        count = len(devices)
    assert count > 3 and winners.not_kept(file) == 0


def test_command_fails_if_winners_were_not_kept(file, monkeypatch, tmp_path, capsys):
    """The exit status shows it to a script."""
    from attn_dispatch_tools.cli import main
    from attn_dispatch_tools.commands import tune

    calls = tmp_path / "calls.json"
    calls.write_text('[{"query": "float32[2,48,4,16]", "is_causal": true}]')
    file.with_name(".winners.json.lock").symlink_to(tmp_path / "elsewhere")

    def tune_without_device(spec, device):
        try:
            winners.keep(WINNER)
        except OSError as error:
            print(error)
        return WINNER

    monkeypatch.setattr(tune.contest, "tune", tune_without_device)
    monkeypatch.setattr(tune.select, "winner", lambda *_: None)
    calls.write_text('[{"query": "float32[2,48,4,16]", "key": "query", "value": "query"}]')
    with pytest.raises(SystemExit, match=r"^error: 1 winner is not kept in .*winners\.json$"):
        main(["tune", str(calls)])


def test_reading_does_not_wait_for_a_lock(file, monkeypatch):
    """A file that another process has locked is read at once."""
    winners.keep(WINNER)
    process = holder(file.with_name(".winners.json.lock"))
    monkeypatch.setattr(reading, "SECONDS", 0.0)
    assert winners.find(SPEC, CPU, select.versions) == WINNER
    process.communicate(timeout=60)


def test_removed_working_folder_raises_no_such_file(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.setenv(winners.FILE, "winners.json")
    assert winners.not_writable(Path("winners.json")).startswith("winners.json: no such file")
    with pytest.raises(OSError, match="no such file"):
        winners.keep(WINNER)
