"""Build of AITER v0.1.15 or later behind this project's adapter, for a machine without a GPU.

Any C++ compiler will do, with HIP's headers. `dispatch` builds AITER's dispatch of one architecture
from its sources, on a fake HIP that records launches; ATTN_DISPATCH_AITER_DIR names their folder.
`capture` builds the adapter against stand-ins of AITER's headers, and records the arguments that
AITER would be called with; it needs no sources.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from attn_dispatch_tools.build_aiter import asm_build, asm_tables, ninja, wheel
from tests.support.aiter_dispatch import build as dev18
from tests.support.repository import ROOT

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "aiter_v0_1_15"
STAND_IN = HERE / "stand_in"
INCLUDE = BUILD / "include"
"""Copies of AITER's headers, which there include this project's shim."""
HEADERS = ("mha_fwd.h", "mha_bwd.h")
_COPIED = (*HEADERS, "aiter_hip_common.h", "aiter_enum.h", "aiter_logger.h")
_OPTIONS = (*asm_build.OPTIONS, "-D__HIP_PLATFORM_AMD__=1")
ADAPTER_SOURCES = wheel.adapter_sources(dev18.ADAPTER, asm_build.GENERATION)


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def missing() -> str:
    """What is missing to compile the adapter, or ""."""
    wanted = {"a C++ compiler": compiler(), "HIP's headers (libamdhip64-dev)": has_hip()}
    return ", ".join(name for name, found in wanted.items() if not found)


def has_hip() -> bool:
    return dev18.HIP_HEADERS.is_dir()


def sources() -> Path | None:
    """The folder of AITER, with csrc and hsa in it."""
    folder = os.environ.get("ATTN_DISPATCH_AITER_DIR")
    return Path(folder) if folder else None


def missing_sources() -> str:
    """What is missing to build AITER's dispatch, or ""."""
    aiter = "" if sources() else "AITER v0.1.15 or later (ATTN_DISPATCH_AITER_DIR=its folder)"
    return ", ".join(filter(None, (missing(), aiter)))


def dispatch(arch: str) -> Path:
    """AITER's dispatch of one architecture, with its kernels beside it as build-aiter puts them."""
    aiter = sources()
    assert aiter is not None
    with _locked():
        _copy_headers(aiter)
        folder = BUILD / arch
        asm_tables.write(aiter / "hsa", arch, folder / "tables")
        kernels = folder / "hsa"
        kernels.unlink(missing_ok=True)
        kernels.symlink_to(aiter / "hsa")
        files = [aiter / "csrc" / "cpp_itfs" / f"mha_{x}.cu" for x in ("fwd", "bwd")]
        files += dev18.ADAPTER.glob("aiter_asm_folder.cc")
        flags = [
            *(f"-I{INCLUDE}", f"-I{folder / 'tables'}"),
            *(f"-DATTN_DISPATCH_AITER_ARCH={arch}", "-DATTN_DISPATCH_AITER_ASM_ROOT"),
        ]
        return _build(folder / "dispatch.so", files, flags)


def capture(arch: str) -> Path:
    """The adapter, for one architecture, before a recorder of AITER's arguments."""
    with _locked():
        folder = BUILD / f"capture-{arch}"
        for way in ("fwd", "bwd"):
            (folder / "hsa" / arch / f"fmha_v3_{way}").mkdir(parents=True, exist_ok=True)
        files = [HERE / f"capture_{x}.cc" for x in ("forward", "backward")]
        files += dev18.ADAPTER.glob("aiter_asm_folder.cc")
        flags = [
            *(f"-I{STAND_IN}", f"-I{HERE}"),
            *(f"-DATTN_DISPATCH_AITER_ARCH={arch}", "-DATTN_DISPATCH_AITER_ASM_ROOT"),
        ]
        return _build(folder / "capture.so", files, flags)


@contextmanager
def _locked() -> Iterator[None]:
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy_headers(aiter: Path) -> None:
    INCLUDE.mkdir(exist_ok=True)
    for name in _COPIED:
        _copy(aiter / "csrc" / "include" / name, INCLUDE / name)
    _copy(HERE / "ck_tile_shim.h", INCLUDE / "ck_tile_shim.h")


def _copy(source: Path, target: Path) -> None:
    if not target.exists() or target.read_bytes() != source.read_bytes():
        shutil.copyfile(source, target)


def _build(target: Path, files: Sequence[Path], flags: Sequence[str]) -> Path:
    environment = dev18.ADAPTER / wheel.ENVIRONMENT[0]
    fake = [dev18.HERE / f"fake_{x}.cc" for x in ("hip", "launch")]
    fake.append(HERE / "fake_fat_binaries.cc")
    everything = [*files, *ADAPTER_SOURCES, environment, *fake]
    flags = [
        *("-x", "c++", "-std=c++20", "-O0", "-fPIC", "-w", "-fvisibility=hidden", *_OPTIONS),
        *(*flags, f"-I{dev18.ADAPTER}", f"-I{dev18.HERE}"),
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(lambda x: _compile(x, flags, target.parent), everything))
    if not target.exists() or target.stat().st_mtime < max(x.stat().st_mtime for x in objects):
        linked = target.with_suffix(f".{os.getpid()}")
        options = ["-shared", "-Wl,-z,defs", "-Wl,-Bsymbolic", *ninja.WRAPPED]
        dev18.run([_compiler(), *options, "-o", str(linked), *map(str, objects)])
        linked.replace(target)
    return target


def _compile(source: Path, flags: Sequence[str], folder: Path) -> Path:
    target = folder / f"{source.name}.o"
    # Only the fake HIP is exported, and the adapter's table, which says so itself.
    extra = ["-fvisibility=default"] if source.parent in (dev18.HERE, HERE) else []
    command = [_compiler(), *flags, *extra, "-c", str(source), "-o", str(target)]
    headers = [*dev18.HERE.glob("*.h"), *dev18.ADAPTER.glob("aiter*.h"), *HERE.rglob("*.h")]
    headers += [*INCLUDE.glob("*.h"), *(folder / "tables").glob("*.hpp")]
    dev18.make(target, command, [source, *sorted(headers)])
    return target


def _compiler() -> str:
    found = compiler()
    assert found is not None
    return found
