"""The `attn-dispatch build-fa4` command with stand-ins for the kernels and their compiler."""

from __future__ import annotations

import argparse
import os
import platform
import stat
import subprocess
import sys

import pytest

from attn_dispatch.fa4 import folder as fa4_folder
from attn_dispatch_tools.build_fa4 import command, compiling, environment
from tests.support import fa4_stand_in
from tests.support.repository import environment as child_environment

INSTALLED = ["apache-tvm-ffi>=0.1.6,<0.2", "fa4-jax==0.1.0", "quack-kernels==0.6.4"]


def _run(*arguments: object) -> None:
    parser = argparse.ArgumentParser(prog="attn-dispatch")
    command.add_parser(parser.add_subparsers(required=True), help="")
    args = parser.parse_args(["build-fa4", *map(str, arguments)])
    args.run(args)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(fa4_folder, "cache", lambda: tmp_path / "cache")
    monkeypatch.setenv("CC", str(fa4_stand_in.linker(tmp_path)))


@pytest.fixture
def stand_in(tmp_path):
    return fa4_stand_in.python(tmp_path)


def _loaded(path) -> str:
    """The versions and sets of a library, as a new process reads them."""
    code = (
        "import sys; from pathlib import Path; from attn_dispatch.fa4 import compiled;"
        "from tests.support import fa4_emulated;"
        "found = compiled.load(fa4_emulated.module(), Path(sys.argv[1]));"
        "print(found.unusable_reason, found.versions, *(x.name for x in found.sets))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True, text=True, env=child_environment(), timeout=600,  # it may compile
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_command_builds_once_and_adds_sets_later(stand_in, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ("--python", stand_in.path, "--out", out)
    _run(*arguments, "--set", "*_d64_*", "--jobs", 2)
    sets = ["sm90_d64_bfloat16", "sm90_d64_float16"]
    assert sorted(stand_in.taken()) == sorted([*INSTALLED, *sets])
    printed = capsys.readouterr()
    library = out / fa4_folder.LIBRARY
    assert printed.out.startswith(f"{library}: 2 sets, ")
    assert "Compiling" in printed.err or "sm90_d64_float16" in printed.err
    assert _loaded(library) == " ".join([environment.versions(), *sets])

    _run(*arguments, "--set", "*_d64_*")
    assert stand_in.taken() == []
    _run(*arguments, "--set", "*_d64_bfloat16", "--set", "sm90_d192_128_float16")
    assert stand_in.taken() == ["sm90_d192_128_float16"]
    assert _loaded(library).endswith("sm90_d64_bfloat16 sm90_d192_128_float16")
    assert [x.name for x in out.iterdir()] == [fa4_folder.LIBRARY]


def test_sets_are_for_the_architectures_that_are_named(stand_in, tmp_path):
    arguments = ("--python", stand_in.path, "--out", tmp_path, "--set", "*_d64_bfloat16")
    for archs in (["sm100"], ["sm90", "sm100"]):
        _run(*arguments, *(y for x in archs for y in ("--arch", x)))
        names = [f"{x}_d64_bfloat16" for x in archs]
        library = tmp_path / fa4_folder.LIBRARY
        assert _loaded(library) == " ".join([environment.versions(), *names])


def test_without_out_the_library_is_where_it_is_looked_for(stand_in, tmp_path, monkeypatch):
    path = tmp_path / "elsewhere" / "another_name.so"
    monkeypatch.setenv(fa4_folder.VARIABLE, str(path))
    _run("--python", stand_in.path, "--set", "sm90_d64_float16")
    assert fa4_folder.library() == path and path.is_file()


def test_an_older_library_stays_whole_for_those_that_have_it_open(stand_in, tmp_path):
    library = tmp_path / fa4_folder.LIBRARY
    library.write_text("older")
    with library.open() as older:
        _run("--python", stand_in.path, "--out", tmp_path, "--set", "sm90_d64_float16")
        assert older.read() == "older"
    assert library.read_bytes()[:4] == b"\x7fELF"


def test_a_set_that_fails_is_named_with_its_last_lines_and_the_next_build_continues(
    stand_in, tmp_path
):
    arguments = ("--python", stand_in.path, "--out", tmp_path / "out", "--jobs", 1)
    stand_in.fail("d64_float16")
    sentence = r"error: compiling sm90_d64_float16 failed; its last lines are:\s+it went wrong"
    with pytest.raises(SystemExit, match=sentence):
        _run(*arguments, "--set", "*_d64_*", "--set", "*_d96_*")
    assert stand_in.taken() == [*INSTALLED, "sm90_d64_bfloat16", "sm90_d64_float16"]
    assert not (tmp_path / "out" / fa4_folder.LIBRARY).exists()
    objects = list((tmp_path / "cache" / "objects").iterdir())
    assert [x.name.rpartition("-")[0] for x in objects] == ["sm90_d64_bfloat16"]
    stand_in.fail("")
    _run(*arguments, "--set", "*_d64_*")
    assert stand_in.taken() == ["sm90_d64_float16"]


def test_what_cannot_be_installed_is_installed_again(stand_in, tmp_path):
    arguments = ("--python", stand_in.path, "--out", tmp_path, "--set", "sm90_d64_float16")
    stand_in.fail("fa4-jax")
    sentence = r"error: pip install fa4-jax==0.1.0 failed; its last lines are:\s+it went wrong"
    with pytest.raises(SystemExit, match=sentence):
        _run(*arguments)
    stand_in.taken()
    stand_in.fail("")
    _run(*arguments)
    assert stand_in.taken() == [*INSTALLED, "sm90_d64_float16"]


# Errors before anything is installed.


@pytest.mark.parametrize(
    ("arguments", "start", "end"),
    [
        (["--set", "sm100_*"], "--set: expected one of sm90_d64_bfloat16, ", "needs --arch sm100"),
        (["--set", "*_d80_*"], "--set: expected one of sm90_d64_bfloat16, ", ", got '*_d80_*'"),
        (["--set", "*_d64_*", "--set", ""], "--set: expected one of sm90_d64_bfloat16, ", "''"),
        (["--out", __file__], "--out: expected a folder, got ", "(File exists)"),
        (["--python", "/no/python"], "/no/python -m venv failed: /no/python: ", "or directory"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, start: str, end: str):
    with pytest.raises(SystemExit) as stop:
        _run("--out", tmp_path / "out", *arguments)
    message = str(stop.value.code)
    assert message.startswith(f"error: {start}") and message.endswith(end), message


def test_a_wrong_set_leaves_no_folder(tmp_path):
    with pytest.raises(SystemExit):
        _run("--set", "nothing", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_jobs_is_a_positive_number(capsys):
    with pytest.raises(SystemExit):
        _run("--jobs", "0")
    assert "argument --jobs: expected at least 1, got 0" in capsys.readouterr().err


def test_a_machine_for_which_no_host_code_is_compiled_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    sentence = "error: the kernels' host code is compiled for x86-64 and aarch64, and this is risc"
    with pytest.raises(SystemExit, match=sentence):
        _run("--out", tmp_path)


def test_a_library_for_other_machines_has_its_own_objects_and_compiler(
    stand_in, tmp_path, monkeypatch
):
    arguments = ("--python", stand_in.path, "--set", "sm90_d64_float16", "--out", tmp_path / "out")
    _run(*arguments)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    stand_in.taken()
    _run(*arguments)
    assert stand_in.taken() == ["sm90_d64_float16"]
    monkeypatch.delenv("CC")
    cross = fa4_stand_in.linker(tmp_path).rename(tmp_path / "x86_64-linux-gnu-gcc")
    monkeypatch.setenv("PATH", f"{cross.parent}{os.pathsep}{os.environ['PATH']}")
    _run(*arguments, "--host", "x86-64")
    assert stand_in.taken() == []  # compiled above
    assert (tmp_path / "out" / fa4_folder.LIBRARY).is_file()


def test_without_a_compiler_for_other_machines_nothing_is_compiled(stand_in, tmp_path, monkeypatch):
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    sentence = (
        "error: there is no C compiler for aarch64, which links the library; install "
        "aarch64-linux-gnu-gcc or set CC"
    )
    with pytest.raises(SystemExit, match=sentence):
        _run("--python", stand_in.path, "--host", "aarch64", "--out", tmp_path / "out")
    assert stand_in.taken() == []


def test_a_library_for_other_machines_is_not_put_where_this_one_looks(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(SystemExit, match="error: --host aarch64: expected --out too, as this mach"):
        _run("--host", "aarch64")


def test_an_interrupted_build_says_that_it_can_be_continued(
    stand_in, tmp_path, monkeypatch, capsys
):
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "_compile", interrupt)
    with pytest.raises(SystemExit) as stop:
        _run("--python", stand_in.path, "--out", tmp_path / "out", "--set", "sm90_d64_float16")
    assert stop.value.code == 130
    assert "the same command continues the build" in capsys.readouterr().err


def test_a_device_is_not_replaced(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv(fa4_folder.VARIABLE, str(tmp_path / "pipe"))
    with pytest.raises(SystemExit, match=r"expected the name of a file, got .*pipe"):
        _run("--set", "*_d64_bfloat16")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
