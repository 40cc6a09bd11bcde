"""`attn-dispatch build-aiter --aiter`: AITER v0.1.15 or later, without CK."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter.release import DEV18, Release
from attn_dispatch_tools import cli
from attn_dispatch_tools.build_aiter import asm_tables, checkout, command, toolchain
from attn_dispatch_tools.build_aiter.errors import BuildError
from tests.support import fake_aiter
from tests.support.fake_aiter import needs_ninja
from tests.support.fake_aiter_checkout import make_checkout, make_wheel


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
    assert checkout.find(aiter, "0.1.18").version == (0, 1, 18)


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


def test_sources_that_are_older_than_their_version_says_are_refused(aiter: Path):
    (aiter / "csrc/include/mha_bwd.h").write_text("void* dq_acc_ptr;")
    with pytest.raises(BuildError, match=r"called AITER 0\.1\.19, but .*mha_bwd\.h there is not"):
        checkout.find(aiter, "0.1.19")


def test_version_without_a_folder_is_refused():
    with pytest.raises(SystemExit, match="--aiter-version: expected --aiter FOLDER as well"):
        cli.main(["build-aiter", "--arch", "gfx942", "--aiter-version", "0.1.19"])


# The tables of kernels.


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_tables_hold_the_rows_of_one_architecture(aiter: Path, tmp_path: Path):
    assert asm_tables.write(aiter / "hsa", "gfx942", tmp_path) == 3
    source = tmp_path / "table.cc"
    source.write_text(
        '#include "asm_fmha_v3_fwd_configs.hpp"\n'
        'extern "C" const char* file(const char* name) {\n'
        "  const auto found = cfg_fmha_fwd.find(name);\n"
        "  if (found == cfg_fmha_fwd.end()) return nullptr;\n"
        "  const auto& row = found->second;\n"
        '  const bool is_two = row.mask == 2 && row.mode == 1 && row.dtype == "bf16" &&\n'
        '                      row.arch == "gfx942" && row.ts_qo == 256;\n'
        '  return is_two ? row.co_name.c_str() : "another";\n'
        "}\n"
    )
    library = tmp_path / "table.so"
    flags = ("-std=c++20", "-shared", "-fPIC")
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    file = ctypes.CDLL(str(library)).file
    file.restype = ctypes.c_char_p
    assert file(b"gfx942_ZN5aiter3twoE") == b"fmha_v3_fwd/two.co"
    assert file(b"gfx942_ZN5aiter3oneE") == b"another"
    assert file(b"gfx950_ZN5aiter3twoE") is None
    text = (tmp_path / "asm_fmha_v3_bwd_configs.hpp").read_text()
    # A table without rows is there, and a row without a column has 0.
    assert re.search(r"cfg_fmha_bwd_dq_shuffle = \{\s*\};", text)
    assert '"fp16", 64, 64, 0, 128}' in text


@pytest.mark.parametrize(
    "row", ["bf16,128,128", 'bf16,1,1,0,0,0,1,1,a"b,one.co', "bf16,x,1,0,0,0,1,1,a,b.co"]
)
def test_a_table_that_is_not_known_is_refused(aiter: Path, tmp_path: Path, row: str):
    path = aiter / "hsa/gfx942/fmha_v3_fwd/fmha_fwd.csv"
    path.write_text(path.read_text() + row + "\n")
    with pytest.raises(BuildError, match=r"not known here|no table of ASM kernels"):
        asm_tables.write(aiter / "hsa", "gfx942", tmp_path)


def test_an_architecture_without_tables_is_refused(aiter: Path, tmp_path: Path):
    with pytest.raises(BuildError, match="gfx950/fmha_v3_fwd has no table"):
        asm_tables.write(aiter / "hsa", "gfx950", tmp_path)


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
    tools = dataclasses.replace(tools, compile_check_only=False)
    monkeypatch.setattr(toolchain, "find", lambda arch, work: tools)
    return log


@needs_ninja
def test_the_command_builds_one_library(
    aiter: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    words = ("--arch", "gfx942", "--aiter", str(aiter), "--aiter-version", "0.1.17")
    _run(*words, "--out", str(out))
    folder = out / "gfx942"
    assert (folder / aiter_folder.ADAPTER).read_text() == "built"
    record = aiter_folder.read(folder)
    assert record is not None and not record.compile_check_only
    assert (record.generation, record.wheel_version, record.asm_kernels) == (
        "v0.1.15", "0.1.17", 4
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


@needs_ninja
def test_what_an_older_version_lacks_is_printed(
    aiter: Path, compiler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (aiter / "hsa/gfx942").rename(aiter / "hsa/gfx950")
    words = ("--arch", "gfx950", "--aiter", str(aiter), "--out", str(tmp_path / "out"))
    _run(*words, "--aiter-version", "0.1.17")
    printed = capsys.readouterr().out
    assert "forward with head dims (192, 128) needs AITER v0.1.18 or newer" in printed
    assert "AITER v0.1.19 or newer is recommended" in printed
    _run(*words, "--aiter-version", "0.1.19")
    printed = capsys.readouterr().out
    assert "needs" not in printed and "recommended" not in printed


@needs_ninja
def test_a_missing_kernel_stops_the_build(aiter: Path, compiler: Path, tmp_path: Path):
    """AITER would fail when a call needs it."""
    (aiter / "hsa/gfx942/fmha_v3_bwd/odo.co").unlink()
    with pytest.raises(SystemExit, match=r"lacks 1 of the 3 ASM kernels in its tables: odo\.co"):
        _run("--arch", "gfx942", "--aiter", str(aiter), "--aiter-version", "0.1.19",
             "--out", str(tmp_path / "out"))  # fmt: skip


@needs_ninja
def test_without_rocm_nothing_is_built(aiter: Path, tmp_path: Path, monkeypatch):
    tools, _ = fake_aiter.make_toolchain(tmp_path)
    monkeypatch.setattr(toolchain, "find", lambda arch, work: tools)
    with pytest.raises(SystemExit, match=r"needs ROCm 6\.2 or newer to compile"):
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
