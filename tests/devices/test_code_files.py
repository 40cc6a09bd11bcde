"""Files of machine code that must not be loaded: the loader would crash, wait or obey."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_dispatch import environment
from attn_dispatch.devices import code_files
from tests.support.backend import needs_cudnn
from tests.support.compiled import library, needs_compiler
from tests.support.fake_aiter import shared_library
from tests.support.repository import environment as child_environment

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = library(tmp_path_factory.mktemp("whole") / "lib.so", "char much[1000000] = {1};")
    return path.read_bytes()


def replaced_by_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replaced_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replaced(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


def cut(size: int) -> Callable[[Path], object]:
    return lambda file: os.truncate(file, size)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (cut(0), "is not a library"),
    "text": (replaced(b"text"), "is not a library"),
    "cut in the header": (cut(40), "is cut off: it has 40 bytes"),
    "cut in the table": (cut(100), "is cut off: it has 100 bytes, and fewer than its "),
    "cut in a segment": (cut(40_000), "is cut off: it has 40000 bytes, and segment "),
    "32 bits": (replaced(b"\x7fELF\x01\x01" + bytes(58)), "is for ELF machine 0: expected a lib"),
    "big endian": (replaced(b"\x7fELF\x02\x02" + bytes(58)), "is for ELF machine 0: expected"),
    "a GPU": (replaced(shared_library(224)), "is for ELF machine 224: expected a library for "),
    "pipe": (replaced_by_a_pipe, "is not a file"),
    "folder": (replaced_by_a_folder, "is not a file"),
    "group": (lambda file: file.chmod(0o664), "can be written by other users (`chmod go-w` ends"),
    "world": (lambda file: file.chmod(0o646), "can be written by other users (`chmod go-w` ends"),
}


@pytest.mark.parametrize("spoil, why", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_library_is_refused_by_name(tmp_path, whole, spoil, why):
    (path := tmp_path / "lib.so").write_bytes(whole)
    path.chmod(0o644)
    assert code_files.library_problem(path, is_named=True) == ""
    spoil(path)
    link = tmp_path / "link.so"
    link.symlink_to(path)
    for name in (path, link):
        assert code_files.library_problem(name, is_named=True).startswith(f"{name} {why}")


def test_only_a_named_library_must_be_ours(tmp_path, whole, monkeypatch):
    """What is among Python's packages may be anyone's, as the Python beside it may."""
    (path := tmp_path / "lib.so").write_bytes(whole)
    found = path.stat()
    others = os.stat_result((found.st_mode, *found[1:4], 54321, *found[5:10]))
    monkeypatch.setattr(os, "fstat", lambda opened: others)
    assert code_files.library_problem(path, is_named=False) == ""
    message = f"{path} belongs to user 54321 ({environment.TRUST_FILES}=1 trusts it)"
    assert code_files.library_problem(path, is_named=True) == message
    monkeypatch.setenv(environment.TRUST_FILES, "1")
    assert code_files.library_problem(path, is_named=True) == ""


def test_what_is_not_there_is_left_to_the_loader(tmp_path):
    assert code_files.library_problem(tmp_path / "none.so", is_named=True) == ""


def test_roots_libraries_are_trusted():
    (libc,) = {x for x in Path("/proc/self/maps").read_text().split() if "/libc.so" in x}
    assert code_files.library_problem(libc, is_named=True) == ""


_LOAD = """
import ctypes, os, sys
from pathlib import Path
from types import SimpleNamespace
from attn_dispatch.aiter import folder, library as aiter
from attn_dispatch.cudnn import library as cudnn
from attn_dispatch.fa4 import compiled
from attn_dispatch.flash import generations, library as flash

path, loads = Path(sys.argv[1]), lambda path, *arch: ctypes.CDLL(path)
os.environ |= {"ATTN_DISPATCH_AITER": str(path.parent), "ATTN_DISPATCH_CUDNN": str(path)}
flash._folder = lambda: path.parent
one = generations.ALL[0]
(path.parent / one.library).symlink_to(path)
print(flash.loading_failure(one))
print(compiled.load(SimpleNamespace(load_fa4=loads), path).unusable_reason)
print(cudnn.find().unusable_reason)
build = path.parent / "gfx942"
build.mkdir()
folder.AiterBuild("dev18", "gfx942", "0.1.7", "", "", "", "", False, 1, 0, "").write(build)
folder.asm_folder(build, "gfx942").mkdir(parents=True)
for bad in folder.libraries("gfx942"):
    for name in folder.libraries("gfx942"):
        (build / name).unlink(missing_ok=True)
        (build / name).symlink_to(path if name == bad else sys.argv[2])
    print(aiter.load(SimpleNamespace(load_aiter=loads), "gfx942").unusable_reason)
"""


@needs_cudnn
def test_every_library_is_judged_before_it_is_loaded(tmp_path, whole):
    """In a new process: loading one that is cut off would end it with SIGBUS."""
    good, bad = tmp_path / "good.so", tmp_path / "bad.so"
    good.write_bytes(whole)
    bad.write_bytes(whole[:40_000])
    command = [sys.executable, "-c", _LOAD, str(bad), str(good)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=child_environment(), timeout=120
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and all("is cut off: it has 40000 bytes" in x for x in lines), lines
    begins = ("dew-flash-attn's", "FlashAttention-4's kernels", "cuDNN could", *3 * ["AITER's lib"])
    assert all(line.startswith(x) for line, x in zip(lines, begins, strict=True)), lines
