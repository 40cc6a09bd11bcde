"""Where ASM kernels come from: the folder of the build, and no other, whatever AITER_ASM_DIR says.

`import aiter` sets that variable to the kernels of its own version: since v0.1.15 to the folder
with one folder for each architecture, and before that to the one of the first device.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.aiter import library as aiter_library
from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.release import GENERATIONS
from tests.support.aiter_dispatch import api, grid
from tests.support.aiter_dispatch import build as dev18
from tests.support.aiter_dispatch.calls import struct_of
from tests.support.aiter_dispatch.launches import ARCHS, atomic_32
from tests.support.aiter_v0_1_15 import build as v0_1_15
from tests.support.fake_aiter import code_object, shared_library

NEWER = "v0.1.15"
OTHER = {"gfx942": "gfx950", "gfx950": "gfx942"}
FORWARD, BACKWARD = grid.CALL, replace(grid.CALL, backward=True)
Outcome = tuple[str, list[str]]

no_sources = pytest.mark.skipif(bool(v0_1_15.missing_sources()), reason=v0_1_15.missing_sources())
no_wheel = pytest.mark.skipif(
    isinstance(dev18.tools(), str), reason=str(dev18.tools()).replace("\n", " ")
)


def run(library: api.Library, call: AiterCall, generation: str) -> Outcome:
    """The sentence of a failure, or "", and what was launched, in a thread that is new.

    AITER of dev18 keeps kernels for each thread.
    """
    found: list[Outcome] = []
    struct = struct_of(call, use_asm=True, accumulator=atomic_32(call), generation=generation)
    thread = threading.Thread(target=lambda: found.append(library.run(struct)))
    thread.start()
    thread.join()
    return found[0]


# AITER_ASM_DIR.


@pytest.fixture
def variables(tmp_path: Path) -> Callable[[Path, str], list[str | None]]:
    """A function that makes values of AITER_ASM_DIR, given the kernels of an architecture."""

    def made(own: Path, arch: str) -> list[str | None]:
        for kernel in own.rglob("*.co"):
            for place in (arch, "."):  # both meanings
                copy = tmp_path / "older" / place / kernel.relative_to(own)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(kernel.read_bytes()[:1000])
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").touch()
        others = (tmp_path / x for x in ("older", "empty", "file", "nowhere"))
        folders = (own, own.parent, own.parent / OTHER[arch], *others)
        return [None, "", *(str(x) for x in folders), *(f"{x}/" for x in folders)]

    return made


def outcomes(
    values: list[str | None], load: Callable[[], api.Library], generation: str
) -> Iterator[tuple[Outcome, Outcome]]:
    """The outcomes of both passes, with each value from before the library is loaded or from the
    first call on."""
    pairs = [(x, None) for x in values] + [(None, x) for x in values]
    for pair in [*pairs, *itertools.pairwise(values)]:
        library, found = None, list[Outcome]()
        for value, call in zip(pair, (FORWARD, BACKWARD), strict=True):
            os.environ.pop("AITER_ASM_DIR", None)
            if value is not None:
                os.environ["AITER_ASM_DIR"] = value
            library = library or load()
            found.append(run(library, call, generation))
        yield found[0], found[1]


@no_sources
@ARCHS
def test_newer_kernels_are_the_builds(arch, variables, tmp_path, monkeypatch):
    monkeypatch.setenv("AITER_ASM_DIR", "")
    hsa = v0_1_15.dispatch(arch).parent / "hsa"
    number = itertools.count()

    def load() -> api.Library:
        """A library that has not loaded any kernel."""
        return newer_library(tmp_path / "builds" / str(next(number)), arch, hsa)

    found = list(outcomes(variables(hsa / arch, arch), load, NEWER))
    assert all(x == found[0] for x in found)
    for (failed, records), kernels in zip(found[0], (1, 3), strict=True):
        assert not failed
        assert [x.split()[2] for x in records] == [arch] * kernels


@no_wheel
@ARCHS
def test_kernels_of_dev18_are_the_builds(arch, variables, aiter_on, monkeypatch):
    monkeypatch.setenv("AITER_ASM_DIR", "")
    own = Path(dev18.asm_folder(arch))
    found = list(outcomes(variables(own, arch), lambda: aiter_on(arch), "dev18"))
    assert all(x == found[0] for x in found)
    for failed, records in found[0]:
        (line,) = (x for x in records if x.startswith("asm "))
        assert not failed and line.split()[2].startswith(f"{own}/")


# The build's own folder, after the library was loaded.


def newer_library(folder: Path, arch: str, hsa: Path) -> api.Library:
    """The dispatch of an architecture in a folder of its own, with a link to AITER's kernels."""
    built = v0_1_15.dispatch(arch)
    folder.mkdir(parents=True)
    (folder / "hsa").symlink_to(hsa)
    library = api.Library(Path(shutil.copy(built, folder)))
    library.set_gpu(arch)
    return library


def _is_a_file(hsa: Path) -> None:
    shutil.rmtree(hsa)
    hsa.touch()


def _for_each_kernel(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    def changed(hsa: Path) -> None:
        for path in hsa.rglob("*.co"):
            change(path)

    return changed


NO_FOLDER = "ASM kernels are missing: there is no folder"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, NO_FOLDER),
    "a file": (_is_a_file, NO_FOLDER),
    "no kernel": (_for_each_kernel(Path.unlink), "failed to open"),
    "folders": (_for_each_kernel(lambda x: (x.unlink(), x.mkdir())), "AITER failed ("),
    "text": (_for_each_kernel(lambda x: x.write_bytes(b"kernel" * 99)), "registration failed"),
}


@no_sources
@ARCHS
@pytest.mark.parametrize("change, sentence", BROKEN.values(), ids=BROKEN)
def test_newer_kernels_that_are_gone_since_are_a_sentence(arch, change, sentence, tmp_path):
    """The next call finds them again."""
    aiter = v0_1_15.sources()
    assert aiter is not None
    hsa = tmp_path / "hsa"

    def copy() -> None:
        for way in ("fwd", "bwd"):
            shutil.copytree(aiter / "hsa" / arch / f"fmha_v3_{way}", hsa / arch / f"fmha_v3_{way}")

    copy()
    library = newer_library(tmp_path / "build", arch, hsa)
    change(hsa)
    for call in (FORWARD, BACKWARD):
        failed, records = run(library, call, NEWER)
        assert sentence in failed and not records
    shutil.rmtree(hsa) if hsa.is_dir() else hsa.unlink(missing_ok=True)
    copy()
    for call in (FORWARD, BACKWARD):
        failed, records = run(library, call, NEWER)
        assert not failed and records


FAILURES = {
    "hipModuleLoad": r'loading the ASM kernel \S+\.co failed with "an error of the fake HIP"',
    "hipModuleGetFunction": r"finding the ASM kernel \w+ in its file failed",
    "hipModuleLaunchKernel": "the launch of a kernel failed",
}


@no_wheel
@ARCHS
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("call", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_a_kernel_of_dev18_that_hip_refuses_is_a_sentence(aiter_on, arch, name, call):
    """AITER alone would end the process, with status 0."""
    library = aiter_on(arch)
    library.fail_call(name, 0)
    failed, records = run(library, call, "dev18")
    assert re.search(FAILURES[name], failed)
    assert not [x for x in records if x.startswith("asm ")]
    assert not run(library, call, "dev18")[0]


@no_wheel
def test_kernels_of_dev18_that_are_gone_since_are_a_sentence(aiter_on, tmp_path):
    library = aiter_on("gfx942")
    for way in ("fwd", "bwd"):
        (tmp_path / f"fmha_v3_{way}").mkdir()
    library.set_asm_folder("gfx942", f"{tmp_path}/")
    for call in (FORWARD, BACKWARD):
        failed, records = run(library, call, "dev18")
        assert f"loading the ASM kernel {tmp_path}/fmha_v3_" in failed
        assert not [x for x in records if x.startswith("asm ")]


# Before a library is loaded.

BAD_FILES = {
    "empty": (b"", "empty"),
    "short": (code_object("gfx942")[:63], "cut off"),
    "cut off": (code_object("gfx942")[:58] + b"\x40\0\x01\0\0\0", "cut off"),
    "text": (b"kernel" * 99, "no code object of an AMD GPU"),
    "32 bits": (b"\x7fELF\x01" + code_object("gfx942")[5:], "no code object of an AMD GPU"),
    "of a CPU": (code_object("gfx942")[:18] + b"\x3e\0" + code_object("gfx942")[20:], "no code ob"),
    "of the other": (code_object("gfx950"), "for gfx950"),
    "of another": (code_object("gfx90a"), "for another architecture"),
}


@pytest.fixture(params=GENERATIONS)
def built(request, tmp_path, monkeypatch) -> Path:
    """A build of a generation with three kernels."""
    monkeypatch.setenv("ATTN_DISPATCH_AITER", str(tmp_path))
    folder = tmp_path / "gfx942"
    for number in range(3):
        kernel = folder / "hsa" / "gfx942" / "fmha_v3_fwd" / f"{number}.co"
        kernel.parent.mkdir(parents=True, exist_ok=True)
        kernel.write_bytes(code_object("gfx942"))
    (folder / aiter_folder.ADAPTER).write_bytes(shared_library())
    aiter_folder.AiterBuild(
        request.param, "gfx942", "0.1.20", "", "", "", "hipcc", False, 9, 3, ""
    ).write(folder)
    return folder


def load_error(loaded: list[Path] | None = None) -> str:
    paths = [] if loaded is None else loaded
    backend: Any = SimpleNamespace(load_aiter=lambda path, arch: paths.append(path))
    return aiter_library.load(backend, "gfx942").unusable_reason


@pytest.mark.parametrize("content, why", BAD_FILES.values(), ids=BAD_FILES)
def test_a_kernel_that_hip_could_not_load_is_refused_by_name(built, content, why):
    kernel = built / "hsa" / "gfx942" / "fmha_v3_fwd" / "1.co"
    kernel.write_bytes(content)
    expected = f"1 of the 3 ASM kernels in {built / 'hsa' / 'gfx942'} cannot be used: "
    assert load_error().startswith(f"{expected}fmha_v3_fwd/1.co: {why}")
    assert load_error().endswith(": run `attn-dispatch build-aiter --arch gfx942`")
    (kernel.parent / "0.co").write_bytes(b"")
    assert "2 of the 3 ASM kernels in" in load_error()
    assert "fmha_v3_fwd/0.co: empty; fmha_v3_fwd/1.co: " in load_error()


@pytest.mark.parametrize("name", [aiter_folder.ADAPTER, "hsa/gfx942/fmha_v3_fwd/1.co"])
def test_code_that_another_user_could_have_written_is_refused(built, name):
    (built / name).chmod(0o666)
    assert f"{Path(name).name}" in load_error() and "written by other users" in load_error()
    (built / name).chmod(0o644)
    assert load_error() == ""


def test_kernels_are_found_after_the_working_directory_changes(built, monkeypatch):
    """The library looks for them on its first call, beside the path that it was loaded by."""
    monkeypatch.chdir(built.parent)
    monkeypatch.setenv("ATTN_DISPATCH_AITER", ".")
    loaded: list[Path] = []
    assert load_error(loaded) == ""
    assert loaded == [built / aiter_folder.ADAPTER]


@no_wheel
def test_every_kernel_of_aiter_is_a_code_object_of_its_architecture():
    sources = v0_1_15.sources()
    folders = [Path(dev18.asm_folder(x)) for x in dev18.ARCHS]
    folders += [sources / "hsa" / x for x in dev18.ARCHS] if sources else []
    for folder in folders:
        assert aiter_library.unusable_kernels(folder, folder.name, 100) == ""
        assert " cannot be used: " in aiter_library.unusable_kernels(
            folder, OTHER[folder.name], 100
        )
