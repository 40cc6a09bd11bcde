"""`attn-dispatch tune`: calls as JSON, scripts, and wrong arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from attn_dispatch.core import select
from attn_dispatch.devices.target import CPU
from tests.support.present import present
from tests.support.tuning_toy import SPEC, Toy, installed_toy


@pytest.fixture
def toy(monkeypatch, tmp_path) -> Iterator[Toy]:
    yield from installed_toy(monkeypatch, tmp_path)


def test_tune_command_tunes_json_calls_and_scripts(toy, tmp_path, capsys, monkeypatch):
    from attn_dispatch_tools.cli import main

    calls = tmp_path / "calls.json"
    calls.write_text(
        '[{"query": "float32[2,48,4,16]", "key": "query", "value": "query", "is_causal": true}]'
    )
    main(["tune", str(calls)])
    printed = capsys.readouterr()
    assert printed.err.count("tuned: ") == 2 and "backward pass" in printed.err
    assert present(select.winner(SPEC, CPU)).engine == "2 2"
    main(["tune", "--inference", str(calls)])
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.count("kept already: toy 2 2 70.0 µs") == 1

    script = tmp_path / "script.py"
    script.write_text(
        "import sys, jax.numpy as jnp, attn_dispatch\n"
        "print('arguments', sys.argv[1:])\n"
        "q = jnp.ones((1, 8, 2, 4))\n"
        "attn_dispatch.dot_product_attention(q, q, q)\n"
        "if __name__ == '__main__': raise ValueError('from the script')\n"
    )
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(ValueError, match="from the script"):
        main(["tune", str(script), "a", "--b"])
    printed = capsys.readouterr()
    assert "arguments ['a', '--b']" in printed.out and "query float32[1,8,2,4]" in printed.err


def test_tune_command_fails_where_nothing_can_be_tuned(tmp_path, capsys, monkeypatch):
    from attn_dispatch_tools.cli import main

    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path / "winners.json"))
    calls, script = tmp_path / "calls.json", tmp_path / "script.py"
    calls.write_text('[{"query": "float32[2,48,4,16]", "key": "query", "value": "query"}]')
    with pytest.raises(SystemExit, match="error: none of the calls can be tuned on this"):
        main(["tune", str(calls)])
    assert capsys.readouterr().out.count("not tuned: there is only one choice") == 2
    calls.write_text("[]")
    with pytest.raises(SystemExit, match="expected at least one call, got an empty list"):
        main(["tune", str(calls)])
    assert "winners are kept" not in capsys.readouterr().out
    script.write_text("raise SystemExit(0)")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(SystemExit):
        main(["tune", str(script)])
    assert "nothing was tuned: the script made no calls" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere.py"], "error: nowhere.py: no such file"),
        (["nowhere.json"], "error: nowhere.json: no such file"),
        (["."], "error: .: expected a file, got a folder"),
        (
            ["--seconds", "0", "calls.json"],
            "argument --seconds: expected a positive number of seconds, got '0'",
        ),
        (["calls.JSON", "--inference"], "error: calls.JSON holds calls; unknown: --inference"),
        (["calls", "a"], "error: calls holds calls; unknown: a"),
    ],
)
def test_wrong_tune_commands_raise(toy, arguments, error, tmp_path, monkeypatch, capsys):
    from attn_dispatch_tools.cli import main

    monkeypatch.chdir(tmp_path)
    for name in ("calls", "calls.json", "calls.JSON"):
        (tmp_path / name).write_text("[]")
    with pytest.raises(SystemExit) as raised:
        main(["tune", *arguments])
    assert error in f"{raised.value} {capsys.readouterr().err}"
    monkeypatch.setenv("ATTN_DISPATCH_WINNERS", str(tmp_path))
    with pytest.raises(SystemExit, match="is not a file that winners can be kept in"):
        main(["tune", "calls.json"])
