"""The scripts of `attn-dispatch completion`, tested in the shells that are installed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from attn_dispatch_tools import cli

SHELLS = ("bash", "zsh", "fish")
PROMPT = "ready> "

_ZSHRC = f"""
fpath=($ZDOTDIR $fpath)
autoload -Uz compinit && compinit -u -D
PS1='{PROMPT}'
"""
_BASHRC = f"source ./bash\nPS1='{PROMPT}'\nbind 'set show-all-if-ambiguous on'\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a script for each shell, and files to complete."""
    pytest.importorskip("shtab")
    folder_path = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        name = "_attn-dispatch" if shell == "zsh" else shell
        with (folder_path / name).open("w") as script, redirect_stdout(script):
            cli.main(["completion", shell])
    (folder_path / ".zshrc").write_text(_ZSHRC)
    (folder_path / "bashrc").write_text(_BASHRC)
    (folder_path / "calls.json").write_text("[]")
    (folder_path / "calm").mkdir()
    return folder_path


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_command(shell: str, folder: Path):
    script = (folder / ("_attn-dispatch" if shell == "zsh" else shell)).read_text()
    assert all(name in script for name in cli.names())
    assert "each-rewrite" in script


def shell_output(
    words: list[str], folder: Path, line: str, is_complete: Callable[[str], bool]
) -> str:
    """The output of an interactive shell after the line and two tabs have been typed."""
    terminal, inside = pty.openpty()
    environment = {"ZDOTDIR": str(folder), "TERM": "dumb", "PATH": os.environ["PATH"]}
    shell = subprocess.Popen(
        words, cwd=folder, env=environment | {"HOME": str(folder)},
        stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
    )  # fmt: skip
    try:
        shown = _read(terminal, lambda x: PROMPT in x)
        os.write(terminal, line.encode() + b"\t\t")
        return shown + _read(terminal, is_complete)
    finally:
        shell.kill()
        shell.wait()
        os.close(inside)
        os.close(terminal)


def _read(terminal: int, is_complete: Callable[[str], bool], seconds: float = 10) -> str:
    shown, until = "", time.monotonic() + seconds
    while not is_complete(shown) and (remaining := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], remaining)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return shown


def fish(folder: Path, line: str) -> str:
    code = f"source fish; complete -C '{line}'"
    words = ["fish", "--no-config", "-c", code]
    home = os.environ | {"HOME": str(folder)}
    return subprocess.check_output(words, cwd=folder, env=home, text=True)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("attn-dispatch ver", "verify"),
        ("attn-dispatch verify --se", "--serving"),
        ("attn-dispatch completion fi", "fish"),
        ("attn-dispatch plan call", "calls.json"),
        ("attn-dispatch verify --out cal", "calm/"),
    ],
)
def test_a_shell_completes(shell: str, line: str, expected: str, folder: Path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if shell == "fish":
        assert expected in fish(folder, line)
        return
    words = {"bash": ["bash", "--rcfile", "bashrc", "-i"], "zsh": ["zsh", "-i"]}[shell]
    assert expected in shell_output(words, folder, line, lambda x: expected in x)


def test_without_shtab_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match="made by shtab: pip install shtab"):
        cli.main(["completion", "bash"])
