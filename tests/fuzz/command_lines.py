"""Drawn command lines with the options of the real parsers, in a folder of damaged files.

Steps that would take long are replaced: a suite, a benchmark, tuning, a build.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest import mock

from attn_dispatch.cudnn import plan_store
from attn_dispatch_tools import cli
from attn_dispatch_tools.bench import command as bench_command
from attn_dispatch_tools.bench.regret import command as regret_command
from attn_dispatch_tools.build_aiter import command as build_command
from attn_dispatch_tools.build_fa4 import command as compile_command
from attn_dispatch_tools.commands import tune as tune_command
from attn_dispatch_tools.pictures import command as mask_command
from attn_dispatch_tools.terminal.building import BuildError
from attn_dispatch_tools.verify import command as verify_command
from tests.fuzz import mutations, strange_files
from tests.fuzz.call_notation import LINES, NUMBERS, WRITTEN
from tests.support.repository import ROOT

assert mask_command  # imported before the first draw, whose time is limited
with contextlib.suppress(ImportError):
    pass

_REPORTS = [
    x
    for x in (ROOT / "tests/gpu/results").glob("verify-*.json")
    if json.loads(x.read_text())["outcomes"]
]
_PARSER = cli.parser()
_COMMANDS: dict[str, argparse.ArgumentParser] = next(
    x.choices  # type: ignore[misc]
    for x in _PARSER._actions
    if isinstance(x, argparse._SubParsersAction)
)

_PATHS = (
    "calls.json", "altered.json", "report.json", "bench.json", "strange.json", "script.py",
    "calls", "folder", "folder/new", "new", "new.svg", "new.png", "nowhere/at/all", "script.py/x",
    ".", "", "/", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/x", "~", "x" * 300, "µ",
    "\udcff.json", "device.json",
)  # fmt: skip
_VALID = {
    "target": ("h100", "mi300x", "cpu", "a100", "sm100"),
    "implementation": ("xla", "cudnn", "aiter"),
    "grids": ("dense", "small"), "directions": ("forward",), "shell": ("bash", "zsh", "fish"),
    "archs": ("gfx942", "gfx950"), "local_window_size": ("4", "4,0", "none,0", "-1,-1"),
    "seq": ("8", "5,8", "16", "64"), "lengths": ("4,6",), "segments": ("1,1,2,2,0,0,0,0",),
    "key_segments": ("1,1,1,1,2,2,2,2",), "max_segments": ("8",), "scale": ("0.5",),
    "logits_soft_cap": ("30",), "dropout_rate": ("0.1",), "cases": ("window/*", "", "*_d64_*"),
    "mod": ("chunked_window(4)", "prefix_lm([3])", "causal()", "soft_cap(3.0)"),
    "cells": ("d128*",), "peers": ("ours*",), "random": ("0", "3"), "seed": ("1", "0"),
    "jobs": ("1",), "rounds": ("1",), "seconds": ("1",), "time_limit": ("1",),
}  # fmt: skip
"""Valid values of options, by their destination."""

_VARIABLES = {
    "ATTN_DISPATCH_TARGET": ("h100", "x", "sm90,sm80", "{", "device.json", "altered.json"),
    "ATTN_DISPATCH_FALLBACK": ("error", "x"),
    "ATTN_DISPATCH_CHECK": ("1", "x"),
    "ATTN_DISPATCH_REWRITES": ("0", "x"),
    "ATTN_DISPATCH_SHARDED_DROPOUT": ("same", "x"),
    "ATTN_DISPATCH_TUNING": ("5", "off", "-1", "x", "nan"),
    "ATTN_DISPATCH_PLANS": ("plans", "calls.json", "calls.json/x", "/dev/null", "~x", "off"),
    "ATTN_DISPATCH_WINNERS": ("kept.json", "strange.json", "folder", "calls.json/x", "off"),
    "COLUMNS": ("0", "40", "100000", "x"),
}
_MAX_RANDOM = 50
"""The limit of drawn cases to list; more would only take longer."""


def draw(seed: int) -> str:
    """Run one command line. Returns the command and how it ended."""
    random = Random(seed)
    words = _words(random)
    drawn = {x: random.choice(y) for x, y in _VARIABLES.items() if random.random() < 0.03}
    kept = {"ATTN_DISPATCH_PLANS": "plans", "ATTN_DISPATCH_WINNERS": "kept.json"}
    variables = kept | drawn
    out, err = io.StringIO(), io.StringIO()
    with _folder(random), _without_work(), mock.patch.dict(os.environ, variables):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ended = _ended(words)
    try:
        assert "Traceback" not in out.getvalue() + err.getvalue()
        if isinstance(ended, str):
            assert ended.startswith("error: ") and 7 < len(ended) < 3000, ended
            return f"{_command(words)}: an error"
        assert ended in (None, 0, 1, 2), ended
        assert ended != 2 or "usage: attn-dispatch" in err.getvalue()
    except AssertionError as error:
        raise AssertionError(f"{words} {variables}: {error}") from None
    return f"{_command(words)}: {'usage' if ended == 2 else 'done'}"


def _ended(words: list[str]) -> str | int | None:
    try:
        cli.main(words)
    except SystemExit as stop:
        assert stop.code is None or isinstance(stop.code, str | int)
        return stop.code
    except Exception as error:
        raise AssertionError(f"{words}: {error!r}") from error
    return None


def _command(words: list[str]) -> str:
    return words[0] if words and words[0] in _COMMANDS else "none"


def _words(random: Random) -> list[str]:
    if random.random() < 0.03:
        return [random.choice(("", "x", "--help", "--version", "-h", "expl"))]
    name = random.choice([*_COMMANDS])
    words = [name]
    for action in _COMMANDS[name]._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        is_needed = action.required or not action.option_strings
        if random.random() < (0.95 if is_needed else 0.15):
            words += _given(random, name, action)
    if random.random() < 0.05:
        words.insert(
            random.randrange(len(words) + 1), random.choice((*NUMBERS[:20], "--", "-x", "--x"))
        )
    return words


def _given(random: Random, name: str, action: argparse.Action) -> list[str]:
    option = list(action.option_strings[:1])
    if action.nargs == 0:
        return option
    if action.dest == "call":
        return [random.choice((*LINES, *LINES, "calls.json", "altered.json", *_PATHS, *NUMBERS))]
    valid: tuple[str, ...] = _VALID.get(action.dest, ())
    if action.type is Path or action.dest in ("repeat", "out", "plot", "file", "torch_python"):
        valid = _PATHS
    kind = random.random()
    if kind < 0.75 and valid:
        value = random.choice(valid)
    elif action.dest in ("random",):
        value = random.choice(("x", "-1", "1.5", str(_MAX_RANDOM)))
    else:
        value = random.choice(NUMBERS)
    return [*option, value.replace("\0", "")]  # no process can be given a NUL


class _Started(SystemExit):
    """Raised in place of a long step: the command line was accepted."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(0)


@contextlib.contextmanager
def _without_work() -> Iterator[None]:
    def started(*_: object, **__: object) -> None:
        raise _Started

    def not_built(*_: object, **__: object) -> None:
        raise BuildError("there is no compiler")

    def not_compiled(*_: object, **__: object) -> None:
        raise BuildError("there is no compiler")

    with contextlib.ExitStack() as stack:
        for module, function, instead in (
            (verify_command, "run", started),
            (bench_command, "present", started),
            (regret_command, "drawn", started),
            (regret_command, "timed_rows", started),
            (tune_command, "_tune_script", started),
            (tune_command.contest, "tune", lambda *_: None),
            (build_command, "build", not_built),
            (compile_command, "build", not_compiled),
            (plan_store, "plan", lambda *_: ("an engine", 0)),
        ):
            stack.enter_context(mock.patch.object(module, function, instead))
        yield


@contextlib.contextmanager
def _folder(random: Random) -> Iterator[None]:
    """A working folder with files. One time in fifty it is removed before the command starts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "folder").mkdir()
        calls = json.dumps(WRITTEN).encode()
        for file in ("calls.json", "calls"):
            (folder / file).write_bytes(calls)
        (folder / "script.py").write_text("print(1)")
        benches = [*(ROOT / "benchmarks/results").glob("bench*.json")]
        source = random.choice((WRITTEN, _report(random, _REPORTS), _report(random, benches)))
        (folder / "altered.json").write_bytes(mutations.json_text(random, source))
        for file, real in (("report.json", _REPORTS), ("bench.json", benches)):
            (folder / file).write_bytes(mutations.json_text(random, _report(random, real)))
        devices = [*(ROOT / "dispatch/attn_dispatch/devices/targets").glob("*.json")]
        (folder / "device.json").write_bytes(mutations.json_text(random, _report(random, devices)))
        strange_files.make(random, folder / "strange.json", calls)
        if random.random() < 0.02:
            gone = folder / "gone"
            gone.mkdir()
            with contextlib.chdir(folder):
                os.chdir(gone)
                gone.rmdir()
                yield
        else:
            with contextlib.chdir(folder):
                yield


_read: dict[Path, object] = {}


def _report(random: Random, files: list[Path]) -> object:
    """A real report, cut to a few outcomes or cells."""
    if not files:
        return {}
    file = random.choice(sorted(files, key=lambda x: x.stat().st_size)[:5])
    if file not in _read:
        found = json.loads(file.read_text())
        # A kept report has only its failures, which stand for the whole run here.
        if "outcomes" in found:
            found["outcomes"] = found["outcomes"][:3]
            statuses = [x["status"] for x in found["outcomes"]]
            found["counts"] = {x: statuses.count(x) for x in found["counts"]}
        if "cells" in found:
            found["cells"] = found["cells"][:3]
        _read[file] = found
    return _read[file]
