"""`attn-dispatch build-aiter --aiter`: AITER v0.1.15 or later, without CK."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.release import DEV18, Release
from attn_dispatch.devices import code_files
from attn_dispatch.devices.aiter_versions import NEWEST, OLDEST
from attn_dispatch_tools import cli
from attn_dispatch_tools.build_aiter import asm_tables, checkout, command, toolchain
from attn_dispatch_tools.terminal.building import BuildError
from tests.support import fake_aiter
from tests.support.aiter_v0_1_15 import build
from tests.support.fake_aiter import needs_ninja
from tests.support.fake_aiter_checkout import (
    SOURCES_V0_1_17,
    make_checkout,
    make_wheel,
    write,
)

REAL = build.sources()
needs_real = pytest.mark.skipif(REAL is None, reason="needs ATTN_DISPATCH_AITER_DIR")


@pytest.fixture
def aiter(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "aiter")


# The sources.


def test_a_wheel_is_found_by_any_of_its_folders(tmp_path: Path):
    folder = make_wheel(tmp_path / "packages", "0.1.20.post1")
    (folder / "aiter").mkdir()
    for place in (folder, folder / "aiter_meta", folder / "aiter"):
        found = checkout.find(place)
        assert (found.text, found.version) == ("0.1.20.post1", (0, 1, 20))
        assert found.root == folder / "aiter_meta"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_version_of_a_checkout_is_its_tag(aiter: Path):
    who = ("-c", "user.name=x", "-c", "user.email=x@y")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "x"), ("tag", "v0.1.19")):
        subprocess.run(["git", "-C", str(aiter), *who, *words], check=True)
    assert checkout.find(aiter).version == (0, 1, 19)
    assert checkout.find(aiter, "0.1.20").version == (0, 1, 20)


REFUSED = {
    "no sources": (None, r"expected a checkout of AITER v0\.1\.15 or newer, .* has no csrc"),
    "no version": ("", r"the version of AITER in .* is not known \(found 'none'\); give it with"),
    "old": ("0.1.14", r"is AITER 0\.1\.14, and this needs v0\.1\.15 or newer, better v0\.1\.19"),
    "words": ("main", r"is not known \(found 'main'\)"),
}


@pytest.mark.parametrize("version, message", REFUSED.values(), ids=REFUSED)
def test_sources_that_cannot_be_built_are_refused(
    aiter: Path, tmp_path: Path, version: str | None, message: str
):
    with pytest.raises(BuildError, match=message):
        checkout.find(tmp_path if version is None else aiter, version)


MARKS = {
    "v0.1.15": ("csrc/include/mha_bwd.h", "void* dq_acc_ptr;"),
    "v0.1.16": ("csrc/cpp_itfs/mha_bwd.cu", "struct fmha_bwd_odo_args"),
    "v0.1.17": ("csrc/include/aiter_hip_common.h", "int gdx;"),
    "v0.1.19": ("csrc/cpp_itfs/mha_fwd.cu", "a.hdim_q == 192"),
}


@pytest.mark.parametrize("since", MARKS)
def test_sources_that_are_older_than_their_version_says_are_refused(aiter: Path, since: str):
    name, text = MARKS[since]
    (aiter / name).write_text(text)
    message = rf"called AITER 0\.1\.20, but {name} there is older than that of {since}"
    with pytest.raises(BuildError, match=message):
        checkout.find(aiter, "0.1.20")


def test_sources_that_are_newer_than_the_version_that_is_given_are_refused(aiter: Path):
    message = r"called AITER 0\.1\.18, but .*mha_fwd\.cu there is that of v0\.1\.19 or newer"
    with pytest.raises(BuildError, match=message):
        checkout.find(aiter, "0.1.18")


def test_sources_after_the_last_tag_may_be_newer_than_it(tmp_path: Path):
    assert checkout.find(make_wheel(tmp_path, "0.1.18")).version == (0, 1, 18)


KERNELS = {x.since: x for x in checkout.MARKS if x.older}


@pytest.mark.parametrize("since", KERNELS)
def test_kernels_that_are_not_of_their_version_are_refused(aiter: Path, monkeypatch, since):
    mark, before = KERNELS[since], f"0.1.{since[2] - 1}"
    write(aiter, {"csrc/cpp_itfs/mha_fwd.cu": "" if since < (0, 1, 19) else "a.hdim_q == 256"})
    write(aiter, {str(mark.path): b"a kernel"})
    newer = rf"called AITER {before}, but {mark.path} there is that of v0\.1\.{since[2]} or newer"
    with pytest.raises(BuildError, match=newer):
        checkout.find(aiter, before)
    for between in (f"0.1.{since[2]}rc1", f"v{before}-3-g12ab"):
        assert checkout.find(aiter, between).version == (*since[:2], since[2] - 1)
    old = dataclasses.replace(mark, older=(hashlib.sha256(b"a kernel").hexdigest()[:12],))
    monkeypatch.setattr(checkout, "MARKS", (old,))
    assert checkout.find(aiter, before)
    with pytest.raises(BuildError, match=rf"{mark.path} there is older than that of v0\.1\."):
        checkout.find(aiter, f"0.1.{since[2]}")


def test_a_checkout_without_a_file_is_refused_by_its_name(aiter: Path):
    (aiter / "csrc/cpp_itfs/mha_fwd.cu").unlink()
    with pytest.raises(BuildError, match=r"lacks csrc/cpp_itfs/mha_fwd\.cu: expected a whole"):
        checkout.find(aiter, "0.1.19")


@needs_real
def test_each_version_of_the_real_sources_is_known(tmp_path: Path):
    """The folder's name is its version; each of the others is refused."""
    assert REAL is not None
    found = checkout.find(REAL, REAL.name)
    for patch in range(OLDEST[2], NEWEST[2] + 1):
        if patch == found.version[2]:
            continue
        with pytest.raises(BuildError, match="expected the version of these sources"):
            checkout.find(REAL, f"0.1.{patch}")
    for arch in aiter_folder.ARCHS:
        asm_tables.write(REAL / "hsa", arch, tmp_path / arch)


def test_version_without_a_folder_is_refused():
    with pytest.raises(SystemExit, match="--aiter-version: expected --aiter FOLDER as well"):
        cli.main(["build-aiter", "--arch", "gfx942", "--aiter-version", "0.1.19"])


# The command.


def _run(*words: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(), "")
    args = parser.parse_args(["build-aiter", *words])
    command.main(args)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that only logs; its log."""
    tools, log = fake_aiter.make_toolchain(tmp_path)
    tools = dataclasses.replace(tools, compile_check_only=False, hip=(6, 2, 41133))
    monkeypatch.setattr(toolchain, "find", lambda arch, work: tools)
    return log


@needs_ninja
def test_the_command_builds_one_library(
    aiter: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    write(aiter, SOURCES_V0_1_17)
    words = ("--arch", "gfx942", "--aiter", str(aiter), "--aiter-version", "0.1.17")
    before = os.umask(0o002)  # as some systems have it for users
    _run(*words, "--out", str(out))
    os.umask(before)
    folder = out / "gfx942"
    assert (folder / aiter_folder.ADAPTER).read_text() == "built"
    installed = [folder / aiter_folder.ADAPTER, *folder.glob("hsa/**/*.co")]
    assert [x for x in installed if code_files.untrusted(x.stat())] == [] != installed[1:]
    record = aiter_folder.read(folder)
    assert record is not None and not record.compile_check_only
    assert (record.generation, record.wheel_version, record.asm_kernels) == (
        "v0.1.15", "0.1.17", 7
    )  # fmt: skip
    objects = compiler.read_text().split()
    assert {"mha_fwd.o", "mha_bwd.o", "aiter_adapter.o", "aiter_v0_1_15_device.o"} < set(objects)
    assert "aiter_dev18_forward.o" not in objects
    compiled = (folder / "work" / "build.ninja").read_text()
    assert "-DENABLE_CK=0" in compiled and "--wrap=hipModuleLaunchKernel" in compiled

    monkeypatch.setenv("ATTN_DISPATCH_AITER", str(out))
    assert aiter_folder.release("gfx942") == Release("v0.1.15", (0, 1, 17))
    assert aiter_folder.release("gfx950") == DEV18
    assert aiter_folder.version() == "0.1.17"


def test_without_one_kernel_nothing_is_compiled(aiter: Path, compiler: Path, tmp_path: Path):
    shutil.rmtree(aiter / "hsa/gfx942/fmha_v3_fwd/MI300")
    out = tmp_path / "out"
    words = ("--arch", "gfx942", "--aiter", str(aiter), "--aiter-version", "0.1.20")
    with pytest.raises(SystemExit, match=r"^error: .*fwd lacks 2 of the 4 .*: MI300/one\.co, MI"):
        _run(*words, "--out", str(out))
    assert not compiler.read_text() and not (out / "gfx942" / "build.json").exists()


@needs_ninja
def test_what_an_older_version_lacks_is_printed(
    aiter: Path, compiler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_checkout(aiter, "gfx950")
    words = ("--arch", "gfx950", "--aiter", str(aiter), "--out", str(tmp_path / "out"))
    write(aiter, SOURCES_V0_1_17)
    _run(*words, "--aiter-version", "0.1.17")
    printed = capsys.readouterr().out
    assert "forward with head dims (192, 128) needs AITER v0.1.18 or newer" in printed
    assert "AITER v0.1.19 or newer is recommended" in printed
    (aiter / "csrc/cpp_itfs/mha_fwd.cu").write_text("a.hdim_q == 256")
    _run(*words, "--aiter-version", "0.1.19")
    printed = capsys.readouterr().out
    assert "needs" not in printed and "recommended" not in printed and "tried" not in printed
    _run(*words, "--aiter-version", "0.1.21")
    assert "AITER v0.1.21 has not been tried; the newest that was is v0.1.20" in (
        capsys.readouterr().out
    )


@needs_ninja
@pytest.mark.parametrize("hip", [(), (6, 1, 40093)])
def test_without_a_new_enough_rocm_nothing_is_built(
    aiter: Path, tmp_path: Path, monkeypatch, hip: tuple[int, ...]
):
    tools, _ = fake_aiter.make_toolchain(tmp_path)
    tools = dataclasses.replace(tools, compile_check_only=not hip, hip=hip)
    monkeypatch.setattr(toolchain, "find", lambda arch, work: tools)
    with pytest.raises(SystemExit, match=r"needs ROCm 6\.2 or newer, and this is"):
        _run("--arch", "gfx942", "--aiter", str(aiter), "--aiter-version", "0.1.19",
             "--out", str(tmp_path / "out"))  # fmt: skip


def test_a_filter_has_no_meaning_without_ck(aiter: Path, tmp_path: Path):
    with pytest.raises(SystemExit, match="--aiter builds none"):
        _run("--arch", "gfx942", "--aiter", str(aiter), "--filter", "d128",
             "--out", str(tmp_path / "out"))  # fmt: skip


def test_the_newest_generation_that_is_built_is_used(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("ATTN_DISPATCH_AITER", raising=False)
    monkeypatch.setattr(aiter_folder.user_folders, "data", lambda: tmp_path)
    assert aiter_folder.folder("gfx942") == tmp_path / "aiter" / "dev18" / "gfx942"
    record = aiter_folder.AiterBuild(
        "v0.1.15", "gfx942", "0.1.19", "", "", "", "hipcc", False, 9, 4, ""
    )
    folders = {x: tmp_path / "aiter" / x / "gfx942" for x in ("dev18", "v0.1.15")}
    for generation, folder in folders.items():
        folder.mkdir(parents=True)
        dataclasses.replace(record, generation=generation).write(folder)
        assert aiter_folder.folder("gfx942") == folder
        assert aiter_folder.release("gfx942").generation == generation
