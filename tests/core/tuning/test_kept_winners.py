"""Winners in their file: which calls find them, and what happens if the file is damaged."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from attn_dispatch import explain, tuning
from attn_dispatch.core import select
from attn_dispatch.core.tuning import contest, winners
from attn_dispatch.devices.target import CPU
from attn_dispatch.inspection import spec_of
from tests.support.tuning_toy import SPEC, Q


@pytest.mark.parametrize("other", ["device", "versions", "call"])
def test_winner_does_not_serve_another_device_version_or_call(toy, other, monkeypatch):
    with tuning():
        winner = contest.tune(SPEC, CPU)
    assert select.winner(SPEC, CPU) == winner
    if other == "device":
        assert select.winner(SPEC, replace(CPU, name="another CPU")) is None
    elif other == "versions":
        monkeypatch.setattr(select, "__version__", "99")
        assert select.winner(SPEC, CPU) is None
    else:
        wide = spec_of(query=Q, key=Q, value=Q, is_causal=True, local_window_size=(3, 0))
        assert select.winner(wide, CPU) is None


def test_winner_that_no_longer_exists_is_ignored(toy):
    with tuning():
        winner = contest.tune(SPEC, CPU)
    winners.keep(replace(winner, engine="absent"))
    assert select.winner(SPEC, CPU) is None
    assert explain(Q, Q, Q, is_causal=True).chosen_forward == "toy"
    winners.keep(replace(winner, implementation="nobody"))
    assert explain(Q, Q, Q, is_causal=True).chosen_forward == "toy"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": 2, "winners": []}', '{"format": 1, "winners": [{}]}', "\x00"],
)
def test_damaged_file_is_neither_read_nor_overwritten(toy, caplog, capsys, text):
    file = winners.winners_file()
    file.parent.mkdir()
    file.write_text(text)
    with caplog.at_level(logging.WARNING, "attn_dispatch"):
        assert explain(Q, Q, Q, is_causal=True).forward[3].tuned is None
    assert "no winners are read" in caplog.text
    with tuning():
        contest.tune(SPEC, CPU)
    assert "cannot be read as winners, and is left as it is" in capsys.readouterr().err
    assert file.read_text() == text


def test_link_and_mode_survive_and_other_file_kinds_raise(toy, tmp_path, monkeypatch):
    file = tmp_path / "checkout.json"
    with tuning():
        winner = contest.tune(SPEC, CPU)
    os.replace(winners.winners_file(), file)
    file.chmod(0o664)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(link))
    winners.keep(replace(winner, device="another"))
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o664
    assert len(json.loads(file.read_text())["winners"]) == 2
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path / name))
        with pytest.raises(OSError, match="is not a file that winners can be kept in"):
            winners.keep(winner)


def test_times_that_are_not_numbers_are_ignored(toy, caplog):
    with tuning():
        contest.tune(SPEC, CPU)
    file = winners.winners_file()
    content = json.loads(file.read_text())
    content["winners"][0]["microseconds"] = {"xla": "fast"}
    file.write_text(json.dumps(content))
    assert str(explain(Q, Q, Q, is_causal=True)) and "expected numbers by names" in caplog.text
    file.write_text("[" * 100_000)
    assert str(explain(Q, Q, Q, is_causal=True))


def test_unwritable_file_gives_a_message(toy, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path / "file" / "winners.json"))
    with tuning():
        assert contest.tune(SPEC, CPU).engine == "2 2"
    assert "not kept: " in capsys.readouterr().err
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", "off")
    with tuning(), pytest.raises(RuntimeError, match="what tuning finds would be lost"):
        contest.tune(SPEC, CPU)


def test_threads_can_write_to_one_file(toy):
    with tuning():
        winner = contest.tune(SPEC, CPU)
    calls = [replace(winner, call={**winner.call, "window": [i, 0]}) for i in range(40)]
    threads = [threading.Thread(target=winners.keep, args=(x,)) for x in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = json.loads(winners.winners_file().read_text())["winners"]
    assert len(found) == 41
    assert [x.name for x in winners.winners_file().parent.iterdir() if "begun" in x.name] == []


def test_interrupted_write_leaves_the_file_unchanged(toy, tmp_path):
    """The process ends while it writes."""
    with tuning():
        winner = contest.tune(SPEC, CPU)
    before = winners.winners_file().read_text()
    program = (
        "import os, json\n"
        "from attn_dispatch.core.tuning import winners\n"
        "os.replace = lambda *x: os._exit(9)\n"
        f"found = json.loads(open({str(winners.winners_file())!r}).read())['winners'][0]\n"
        "winners.keep(winners.Winner(**{**found, 'device': 'other'}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=120)
    assert ended.returncode == 9
    assert winners.winners_file().read_text() == before
    winners.keep(winner)  # the process's lock was released with it
