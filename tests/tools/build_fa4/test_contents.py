"""The sets that a library names: those lost to a build that replaces it, and kept with --add."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from attn_dispatch.fa4 import folder as fa4_folder
from attn_dispatch_tools.build_fa4 import command, contents, score_mods
from attn_dispatch_tools.build_fa4.sets import SETS
from tests.support import fa4_stand_in

CAP, ALIBI = "attn_dispatch.mods:soft_cap(50)", "attn_dispatch.mods:alibi([1.0])"
PLAIN = [SETS["sm90_d64_bfloat16"], SETS["sm90_d64_float16"]]


def _with(mod: str, name: str = "sm90_d64_bfloat16"):
    return replace(SETS[name], variant=score_mods.variant(mod))


def _file(path: Path, text: str) -> Path:
    path.write_bytes(b"\x7fELF\xff" + text.encode() + b"\0more")
    return path


def _written(sets) -> str:
    """The text of source(), as a C compiler reads it."""
    return json.loads(contents.source(sets).partition(" = ")[2].removesuffix(";\n"))


def test_a_file_says_what_it_was_built_with(tmp_path):
    variant = replace(score_mods.variant(CAP), name='a "name" with \\ and é')
    sets = [*PLAIN, replace(PLAIN[0], variant=variant), SETS["sm100_d64_float16"]]
    assert contents.read(_file(tmp_path / "library.so", _written(sets))) == sets
    assert contents.read(tmp_path / "none.so") == []


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "another library",
        lambda text: text[:-9],
        lambda text: text.replace("sm90_d64_float16", "sm90_d80_float16"),
        lambda text: text.replace('"digest"', '"other"'),
        lambda text: text.replace('"is_small_at_zero": true', '"is_small_at_zero": "true"'),
    ],
)
def test_what_cannot_be_read_is_not_known(tmp_path, change):
    whole = _written([*PLAIN, _with(CAP)])
    assert (changed := change(whole)) != whole
    assert contents.read(_file(tmp_path / "library.so", changed)) is None
    assert contents.replaced(None, PLAIN) == "It replaced a library whose sets cannot be read"


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ([], PLAIN, ""),
        (PLAIN, PLAIN[::-1], ""),
        (PLAIN, PLAIN[:1], "2 sets; no longer there: sm90_d64_float16"),
        (PLAIN[:1], PLAIN[1:], "1 set; no longer there: sm90_d64_bfloat16"),
        (
            [*PLAIN, _with(CAP), _with(CAP, "sm90_d64_float16"), _with(ALIBI)],
            [*PLAIN, _with(ALIBI, "sm90_d96_float16")],
            f"5 sets, 3 of them with a score_mod; no longer there: {CAP}, "
            f"sm90_d64_bfloat16 with {ALIBI}",
        ),
        (
            [*SETS.values()],
            PLAIN,
            "22 sets; no longer there: sm90_d96_bfloat16, sm90_d96_float16, sm90_d128_bfloat16, "
            "sm90_d128_float16 and 16 more",
        ),
    ],
)
def test_what_a_new_library_lacks_is_named(before, after, lost: str):
    expected = lost and f"It replaced a library of {lost}. With --add they stay"
    assert contents.replaced(before, after) == expected


# The command.


@pytest.fixture
def build(tmp_path, monkeypatch, capsys):
    """Run the command, with stand-ins for kernels; returns what it prints."""
    python = fa4_stand_in.python(tmp_path)
    monkeypatch.setattr(fa4_folder, "cache", lambda: tmp_path / "cache")
    monkeypatch.setenv("CC", str(fa4_stand_in.linker(tmp_path)))
    monkeypatch.setenv(fa4_folder.VARIABLE, str(tmp_path / "library.so"))

    def run(*arguments: str) -> list[str]:
        parser = argparse.ArgumentParser(prog="attn-dispatch")
        command.add_parser(parser.add_subparsers(required=True), help="")
        args = parser.parse_args(["build-fa4", "--python", str(python.path), *arguments])
        args.run(args)
        return capsys.readouterr().out.splitlines()

    return run


def test_a_build_says_what_it_replaced_and_add_keeps_it(build, tmp_path):
    library = tmp_path / "library.so"
    (line,) = build("--set", "sm90_d64_bfloat16", "--mod", CAP)
    assert line.startswith(f"{library}: 2 sets, 1 of them with a score_mod, ")
    (line,) = build("--add", "--set", "sm90_d64_float16")
    assert line.startswith(f"{library}: 3 sets, 1 of them with a score_mod, ")
    assert contents.read(library) == [PLAIN[0], _with(CAP), PLAIN[1]]
    line, lost = build("--set", "sm90_d64_float16")
    assert line.startswith(f"{library}: 1 set, ")
    assert lost == (
        "It replaced a library of 3 sets, 1 of them with a score_mod; no longer there: "
        f"{CAP}, sm90_d64_bfloat16. With --add they stay"
    )


def test_add_needs_a_library_that_can_be_read(build, tmp_path):
    library = tmp_path / "library.so"
    library.write_text("older")
    with pytest.raises(SystemExit, match=r"error: --add: the sets of .*library.so cannot be read"):
        build("--add", "--set", "sm90_d64_float16")
    assert library.read_text() == "older"
    _, lost = build("--set", "sm90_d64_float16")
    assert lost == "It replaced a library whose sets cannot be read"


def test_add_keeps_what_a_wheel_brought(build, tmp_path, monkeypatch):
    build("--set", "sm90_d64_bfloat16")
    brought = (tmp_path / "library.so").rename(tmp_path / "brought.so")
    monkeypatch.delenv(fa4_folder.VARIABLE)
    monkeypatch.setattr(fa4_folder, "_in_package", lambda: (brought,))
    monkeypatch.setattr(fa4_folder, "_in_user_folder", lambda: tmp_path / "users" / "library.so")
    build("--add", "--set", "sm90_d64_float16")
    assert contents.read(tmp_path / "users" / "library.so") == PLAIN
