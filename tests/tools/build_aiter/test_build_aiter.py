"""The `attn-dispatch build-aiter` command with stand-ins for AITER and the HIP compiler."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys

import platformdirs
import pytest

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.folder import WHEEL_VERSION, AiterBuild
from attn_dispatch_tools.build_aiter import command, debian, ninja, toolchain, wheel
from attn_dispatch_tools.terminal.building import BuildError
from tests.support import fake_aiter
from tests.support.fake_aiter import needs_ninja

_INSTALL = f"pip install --no-deps amd-aiter=={WHEEL_VERSION}"


def _run(*arguments: str) -> None:
    parser = argparse.ArgumentParser(prog="attn-dispatch")
    command.add_parser(parser.add_subparsers(required=True), help="")
    args = parser.parse_args(["build-aiter", *arguments])
    args.run(args)


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """The folder of the stand-in for the wheel."""
    folder = tmp_path / "wheel"
    fake_aiter.make_wheel(folder)
    monkeypatch.setenv("ATTN_DISPATCH_AITER_WHEEL", str(folder))
    return folder


# Errors: wrong arguments, and tools that are missing.


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: --arch"),
        (["--arch", "gfx90a"], "invalid choice: 'gfx90a' (choose from 'gfx942', 'gfx950')"),
        (["--arch", "gfx942", "--jobs", "0"], "argument --jobs: expected at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(capsys, arguments, sentence):
    with pytest.raises(SystemExit):
        _run(*arguments)
    error = capsys.readouterr().err
    assert sentence.replace("'", "") in error.replace("'", "")  # Python 3.12 dropped the quotes


def test_a_filter_with_a_comma_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="error: a filter cannot hold a comma, got 'd64,d128'"):
        _run("--arch", "gfx942", "--out", str(tmp_path), "--filter", "d64,d128")


@needs_ninja
def test_an_output_that_is_a_file_is_refused(unpacked, tmp_path, monkeypatch):
    tools, _ = fake_aiter.make_toolchain(tmp_path)
    monkeypatch.setattr(toolchain, "find", lambda arch, work: tools)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"error: --out: expected a folder, got .*/file \("):
        _run("--arch", "gfx942", "--out", str(tmp_path / "file"))


def test_a_folder_without_the_wheel_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_AITER_WHEEL", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        _run("--arch", "gfx942", "--out", str(tmp_path))
    assert re.match(r"error: .* holds no amd-aiter wheel, .*; " + _INSTALL, str(stop.value.code))


def test_a_missing_wheel_is_an_error_and_an_installed_one_is_found(tmp_path, monkeypatch):
    monkeypatch.delenv("ATTN_DISPATCH_AITER_WHEEL", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(BuildError, match="there is no amd-aiter wheel, .*" + _INSTALL):
        wheel.find()
    fake_aiter.make_wheel(tmp_path)
    assert wheel.find().meta == tmp_path / "aiter_meta"


def test_another_version_of_the_wheel_is_refused(tmp_path, monkeypatch):
    fake_aiter.make_wheel(tmp_path, version="0.1.9")
    monkeypatch.setenv("ATTN_DISPATCH_AITER_WHEEL", str(tmp_path))
    with pytest.raises(BuildError, match=f"expected amd-aiter {WHEEL_VERSION}, got 0.1.9"):
        wheel.find()


def test_without_a_compiler_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(debian, "_HEADERS", tmp_path)
    monkeypatch.setattr(debian, "_DEVICE_LIBRARIES", tmp_path)
    with pytest.raises(BuildError) as stop:
        toolchain.find("gfx942", tmp_path)
    assert str(stop.value) == (
        "there is no HIP compiler; install ROCm, so that hipcc is on PATH, or, to see only whether "
        "everything compiles, apt-get install clang-22 clang-tools-22 lld-22 libamdhip64-dev "
        "rocm-device-libs"
    )


def test_without_ninja_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BuildError, match=r"there is no ninja, .*; pip install ninja"):
        ninja.find_ninja()


def test_the_adapters_sources_are_found():
    names = [path.name for path in wheel.adapter_sources(wheel.adapter_folder(), "dev18")]
    assert {"aiter_adapter.cc", "aiter_dev18_forward.cc"} < set(names)


# The folders of builds.


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_AITER", str(tmp_path))
    assert aiter_folder.folder("gfx942") == tmp_path / "gfx942"


def test_the_default_folder_is_in_the_users_data(monkeypatch):
    monkeypatch.delenv("ATTN_DISPATCH_AITER", raising=False)
    data = platformdirs.user_data_path("attn-dispatch")
    assert aiter_folder.folder("gfx950") == data / "aiter" / "dev18" / "gfx950"


def test_a_record_can_be_written_read_and_removed(tmp_path):
    build = AiterBuild(
        "dev18", "gfx942", WHEEL_VERSION, "*", "*@*@*", "*", "hipcc", False, 6000, 152, ""
    )
    assert aiter_folder.read(tmp_path) is None
    build.write(tmp_path)
    assert aiter_folder.read(tmp_path) == build
    aiter_folder.forget(tmp_path)
    assert aiter_folder.read(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"arch": "gfx942", "colour": 1}', "[" * 100_000, "\0", '"x"']
)
def test_a_record_of_other_contents_is_refused(tmp_path, text):
    (tmp_path / "build.json").write_text(text)
    with pytest.raises(ValueError, match=r"not a record .* build again with: attn-dispatch build"):
        aiter_folder.read(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "file for its folder"])
def test_a_record_that_is_not_a_file_is_refused(tmp_path, kind):
    folder, why = tmp_path / "gfx942", {
        "folder": "expected a file, got a folder",
        "pipe": "expected a file, got a pipe or a device",
        "file for its folder": "Not a directory; ATTN_DISPATCH_AITER names a folder",
    }  # fmt: skip
    if kind == "file for its folder":
        folder.write_text("")
    else:
        folder.mkdir()
        make = os.mkfifo if kind == "pipe" else os.mkdir
        make(folder / "build.json")
    with pytest.raises(ValueError, match=rf"gfx942/build.json cannot be read: {why[kind]}"):
        aiter_folder.read(folder)


def test_libraries_of_two_architectures_share_only_the_adapters_name():
    """The linker finds the other libraries by name; the adapter is loaded by its path."""
    both = [set(aiter_folder.libraries(x)) for x in ("gfx942", "gfx950")]
    assert both[0] & both[1] == {aiter_folder.ADAPTER}


@needs_ninja
def test_the_command_builds_once_and_adds_kernels_later(unpacked, tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    tools, log = fake_aiter.make_toolchain(tmp_path)
    monkeypatch.setattr(toolchain, "find", lambda arch, work: tools)
    arguments = ("--arch", "gfx942", "--out", str(tmp_path / "out"), "--filter", "d128")
    _run(*arguments)
    printed = capsys.readouterr().out
    assert "compile check only" in printed
    assert "(4 of 8 forward kernels, 2 of 4 backward)" in printed

    folder = tmp_path / "out" / "gfx942"
    build = aiter_folder.read(folder)
    assert build is not None and build.compile_check_only and build.asm_kernels == 2
    assert (build.filter_forward, build.filter_backward) == ("*d128*", "*@*@*d128*")
    assert build.filter_split_kv == "*d128*"
    assert all((folder / name).read_text() == "built" for name in aiter_folder.libraries("gfx942"))
    asm = aiter_folder.asm_folder(folder, "gfx942")
    assert (asm / "fmha_v3_fwd/MI300/fwd.co").read_bytes() == b"kernel"

    log.write_text("")
    _run(*arguments)
    assert log.read_text() == ""
    _run(
        "--arch", "gfx942", "--out", str(tmp_path / "out")
    )  # adds kernels without compiling a file twice
    compiled = [
        name for name in log.read_text().splitlines() if "d128" in name or "codegen" in name
    ]
    assert compiled == []
