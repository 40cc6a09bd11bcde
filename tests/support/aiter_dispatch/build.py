"""Build of AITER's host code from its wheel, behind this project's adapter, for a machine without
a GPU.

The build makes two libraries with the adapter's `attn_dispatch_aiter`. `dispatch.so` contains
AITER's dispatch and records the ASM kernel or CK instance that it would launch. `capture.so`
records the arguments that AITER is called with.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from attn_dispatch_tools.build_aiter import ninja, run_generator, wheel
from tests.support.repository import ROOT

HERE = Path(__file__).parent
ADAPTER = ROOT / "rocm_backend"
BUILD = ROOT / "build" / "aiter_dispatch"
COMMON = HERE / "common.h"
"""Headers that nearly all sources include. Precompiling them halves the time of a build."""
COMPILERS = ("clang++-22", "clang++-19", "clang++")
HIP_HEADERS = Path("/usr/include/hip")
ARCHS = ("gfx942", "gfx950")

ADAPTER_SOURCES = (
    *(path.name for path in wheel.adapter_sources(ADAPTER, "dev18")), wheel.ENVIRONMENT[0]
)  # fmt: skip
V3_SOURCES = tuple(f"asm_fmha_{way}_v3_{arch}.cpp" for way in ("fwd", "bwd") for arch in ARCHS)
DISPATCH_SOURCES = (
    *("fmha_bwd_api.cpp", "fmha_fwd_api.cpp", "fmha_fwd_splitkv_api.cpp"),
    *("mha_fwd.cpp", "mha_bwd.cpp"),
)


@dataclass(frozen=True)
class Tools:
    compiler: str
    aiter_meta: Path

    @property
    def ck(self) -> Path:
        return self.aiter_meta / "3rdparty" / "composable_kernel"

    @property
    def fmha(self) -> Path:
        return self.ck / "example" / "ck_tile" / "01_fmha"


@lru_cache(maxsize=1)
def tools() -> Tools | str:
    """The tools of the build, or a sentence about those that are missing."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    aiter_meta = _aiter_meta()
    missing = []
    if aiter_meta is None:
        missing.append(
            "AITER's sources (ATTN_DISPATCH_AITER_WHEEL=folder with the unpacked amd-aiter wheel)"
        )
    if compiler is None:
        missing.append(f"one of {', '.join(COMPILERS)} (apt install clang)")
    if not HIP_HEADERS.is_dir():
        missing.append(f"{HIP_HEADERS} (apt install libamdhip64-dev)")
    if compiler is None or aiter_meta is None or missing:
        return f"AITER's dispatch is not built here: missing {', and '.join(missing)}"
    return Tools(compiler, aiter_meta)


def build() -> tuple[Path, Path]:
    """Build dispatch.so and capture.so where their sources have changed, and return both paths."""
    found = tools()
    if isinstance(found, str):
        raise RuntimeError(found)
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(found)


def _build(found: Tools) -> tuple[Path, Path]:
    generated = _generate(found)
    hip = _hip_headers()
    flags = [*_flags(found, hip), f"-I{HERE}", f"-I{ADAPTER}"]
    adapter = [ADAPTER / name for name in ADAPTER_SOURCES]
    shared = [*adapter, *(HERE / f"fake_{x}.cc" for x in ("hip", "launch", "folder"))]
    captures = [HERE / f"capture_{x}.cc" for x in ("forward", "backward", "split_kv")]
    dispatch = [*(generated / name for name in (*DISPATCH_SOURCES, *V3_SOURCES))]
    dispatch.append(HERE / "unused_forward.cc")
    sources = [*dispatch, *shared, *captures]
    flags += ["-include-pch", str(_compile(found, [*flags, "-Xclang", "-emit-pch"], COMMON))]
    with ThreadPoolExecutor(max(os.cpu_count() or 1, 1)) as pool:
        objects = dict(
            zip(sources, pool.map(lambda x: _compile(found, flags, x), sources), strict=True)
        )
    dispatching = _link(found, "dispatch.so", [objects[x] for x in (*dispatch, *shared)])
    capture = _link(found, "capture.so", [objects[x] for x in (*captures, *shared)])
    return dispatching, capture


def asm_folder(arch: str) -> str:
    """The folder of AITER's ASM kernels for a GPU."""
    found = tools()
    assert isinstance(found, Tools)
    return f"{found.aiter_meta / 'hsa' / arch}/"


def _aiter_meta() -> Path | None:
    folder = os.environ.get("ATTN_DISPATCH_AITER_WHEEL")
    if folder:
        return Path(folder) / "aiter_meta" if (Path(folder) / "aiter_meta").is_dir() else None
    try:
        files = importlib.metadata.files("amd-aiter") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    inside = next((x for x in files if x.parts[0] == "aiter_meta"), None)
    return Path(str(inside.locate())).parents[len(inside.parts) - 2] if inside else None


def _generate(found: Tools) -> Path:
    """Generate AITER's sources with its generators, and return their folder."""
    output = BUILD / "generated"
    scripts = [
        (HERE / "generate.py", str(found.fmha), str(output)),
        *((found.aiter_meta / "hsa" / arch / f"fmha_v3_{way}" / "codegen.py", "-o", str(output))
          for arch in ARCHS for way in ("fwd", "bwd")),
        (found.aiter_meta / "csrc/cpp_itfs/mha_fwd_generate.py", "-r", "5", "-o", str(output)),
        (found.aiter_meta / "csrc/cpp_itfs/mha_bwd_generate.py", "-r", "3", "-o", str(output)),
    ]  # fmt: skip
    wanted = _hash(*(part for script in scripts for part in (script[0], *script[1:])))
    if _is_fresh(output / "stamp", wanted):
        return output
    output.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    for script, *arguments in scripts:
        command = [run_generator.__file__, ";".join(ARCHS), str(script), *arguments]
        run([sys.executable, *command], environment)
    (output / "stamp").write_text(wanted)
    return output


def _hip_headers() -> Path:
    """Copy Debian's HIP 5.2.3 headers and make the vector types trivially copyable.

    CK relies on that. The types are so since ROCm 6.
    """
    output = BUILD / "hip_headers"
    types = "hip/amd_detail/amd_hip_vector_types.h"
    wanted = _hash(HIP_HEADERS.parent / types)
    if _is_fresh(output / "stamp", wanted):
        return output
    shutil.copytree(HIP_HEADERS, output / "hip", dirs_exist_ok=True)
    text = (output / types).read_text()
    for argument in (r"const\s+HIP_vector_base&", r"HIP_vector_base&&"):
        text = re.sub(
            rf"(HIP_vector_base&\s+operator=\({argument}\s*)\w*\s*\)\s*noexcept\s*\{{[^}}]*\}}",
            r"\1) = default;",
            text,
        )
    (output / types).write_text(text)
    (output / "stamp").write_text(wanted)
    return output


def _flags(found: Tools, hip: Path) -> list[str]:
    resources = run([found.compiler, "-print-resource-dir"]).strip()
    return [
        *("-x", "hip", "--offload-host-only", "-nogpuinc", "-nogpulib", "-std=c++20"),
        *("-O0", "-fPIC", "-w", "-fbracket-depth=100000"),
        *("-D__HIP_PLATFORM_AMD__=1", "-D__AMDGCN_WAVEFRONT_SIZE=64", "-DUSE_PROF_API=1"),
        *("-include", str(HERE / "math_names.h")),
        *("-isystem", str(hip), "-isystem", resources),
        f"-I{found.aiter_meta / 'csrc' / 'include'}",
        *(f"-I{found.ck / name}" for name in ("include", "library/include")),
        f"-I{found.fmha}",
    ]


def _compile(found: Tools, flags: Sequence[str], source: Path) -> Path:
    target = BUILD / "objects" / f"{source.name}.o"
    target.parent.mkdir(exist_ok=True)
    extra = (
        ["-include", str(HERE / "instances_backward.h")] if "asm_fmha_bwd" in source.name else []
    )
    command = [found.compiler, *flags, *extra, "-c", str(source), "-o", str(target)]
    headers = sorted([*HERE.glob("*.h"), *ADAPTER.glob("aiter*.h")])
    make(target, command, [source, *headers])
    return target


def make(target: Path, command: list[str], inputs: Sequence[Path]) -> None:
    """Run a command that makes `target`, unless it has run with these inputs before."""
    stamp, wanted = target.with_suffix(".stamp"), _hash(*command, *inputs)
    if not (target.exists() and _is_fresh(stamp, wanted)):
        run(command)
        stamp.write_text(wanted)


def _link(found: Tools, name: str, objects: Sequence[Path]) -> Path:
    target = BUILD / name
    newest = max(path.stat().st_mtime for path in objects)
    if not target.exists() or target.stat().st_mtime < newest:
        linked = target.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-Wl,-z,defs", "-Wl,-Bsymbolic", *ninja.WRAPPED]
        run([found.compiler, *flags, "-o", str(linked), *map(str, objects)])
        linked.replace(target)
    return target


def _hash(*parts: str | Path) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _is_fresh(stamp: Path, wanted: str) -> bool:
    return stamp.exists() and stamp.read_text() == wanted


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    print(*build(), sep="\n")
