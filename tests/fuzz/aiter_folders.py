"""Drawn folders of AITER builds: a small valid one with some parts changed."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from attn_dispatch import aiter
from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter import library as aiter_library
from attn_dispatch.aiter.folder import ADAPTER, AiterBuild
from tests.fuzz import mutations, strange_files
from tests.support.fake_aiter import code_object

_ARCH = "gfx942"
_BUILD = AiterBuild(
    aiter_folder.GENERATION, _ARCH, aiter_folder.WHEEL_VERSION, "*", "*@*@*", "*", "hipcc of HIP 7",
    False, 6297, 1, "2026-11-21T00:00:00+00:00",
)  # fmt: skip
_KERNEL = f"hsa/{_ARCH}/fmha_v3_fwd/forward.co"
_MAX_CHARACTERS = 2000


def draw(seed: int) -> str:
    """Load one folder. Returns what was wrong with it, or that it is used."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as parent:
        root = str(Path(parent, "builds"))
        os.environ["ATTN_DISPATCH_AITER"] = root
        folder = Path(root, _ARCH)
        _make(folder)
        changes = random.choice((0, 1, 1, 1, 2))
        for _ in range(changes):
            random.choice((_change_record, _change_record, _change_entry, _change_root))(
                random, folder
            )
        found = aiter_library.load(SimpleNamespace(load_aiter=_load), _ARCH)
        lines = aiter.library_lines()
        assert lines and all(x.startswith("AITER") for x in lines), lines
        if found.is_usable:
            return "used as it is" if not changes else "used"
        assert (
            changes
            and 0 < len(found.unusable_reason) < _MAX_CHARACTERS
            and "\n" not in found.unusable_reason
        )
        assert str(folder) in found.unusable_reason or "build-aiter" in found.unusable_reason
    causes = (
        "not built",
        "cannot be read",
        "not a record",
        "compiles",
        "missing",
        "has AITER",
        "ASM kernels",
    )
    return next((x for x in causes if x in found.unusable_reason), "the library")


def _load(path: Path, arch: str) -> None:
    """A stand-in for `_rocm`, which can load only one library in a process."""
    try:
        ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeError(f"AITER's library cannot be loaded: {error}; build-aiter") from error


def _make(folder: Path) -> None:
    (folder / _KERNEL).parent.mkdir(parents=True)
    (folder / _KERNEL).write_bytes(code_object(_ARCH))
    (folder / ADAPTER).symlink_to(_some_library())
    _BUILD.write(folder)


@cache
def _some_library() -> str:
    """A library that can be loaded: one that this process has loaded."""
    maps = Path("/proc/self/maps").read_text().split()
    return next(x for x in maps if x.startswith("/") and "/libc.so" in x)


def _change_record(random: Random, folder: Path) -> None:
    content: Any = mutations.json_text(random, dataclasses.asdict(_BUILD))
    _put(random, folder / "build.json", content, 0.25)


def _change_entry(random: Random, folder: Path) -> None:
    name = random.choice(("build.json", ADAPTER, "hsa", f"hsa/{_ARCH}", _KERNEL))
    _put(random, folder / name, random.randbytes(100), 0.6)


def _change_root(random: Random, folder: Path) -> None:
    _put(random, random.choice((folder, folder.parent)), b"not a folder", 0.6)


def _put(random: Random, path: Path, content: bytes, strange: float) -> None:
    """Replace what is at a path by a file or by something strange, if its folder exists."""
    if not path.parent.is_dir():
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if random.random() < strange:
        strange_files.make(random, path, content)
    else:
        path.write_bytes(content)
