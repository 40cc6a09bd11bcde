"""Compiling HIP code without ROCm, with Debian's clang, HIP headers and device libraries.

Debian's HIP 5.2.3 is too old for AITER and for today's clang. So this module changes copies of its
headers and libraries until they compile and link, which shows that everything can be built. They
still differ from ROCm's (hipDeviceProp_t has another layout), so the result must never be run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from attn_dispatch_tools.terminal.building import BuildError

HIP_VERSION = "5.2.3"

_HEADERS = Path("/usr/include/hip")
_DEVICE_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
_CLANG_VERSIONS = (22, 19)

# The control libraries that clang 22 links, and that HIP 5.2.3 lacks.
_CONTROL_LIBRARIES = {
    "oclc_isa_version_942": ("i32", "__oclc_ISA_version", 9402),
    "oclc_isa_version_950": ("i32", "__oclc_ISA_version", 9500),
    "oclc_abi_version_600": ("i32", "__oclc_ABI_version", 600),
}
# HIP 5.2.3's math library reads this symbol to decide whether to flush denormals. clang 22 does not
# link the library that defines it any more, so each of the above defines it, too.
_FLUSH_DENORMALS = ("i8", "__oclc_daz_opt", 1)

# CK uses these names from std, where libstdc++ has them only since GCC 14.
_MATH = """
acosf acoshf asinf asinhf atanf atanhf ceilf cosf coshf erff exp2f expf expm1f fabsf floorf fmaf
fmaxf fminf fmodf log1pf log2f logf powf rintf roundf sinf sinhf sqrtf tanf tanhf
""".split()
_SHIM = f"""#pragma once
#include <cmath>
#if !defined(_GLIBCXX_RELEASE) || _GLIBCXX_RELEASE < 14
namespace std {{ {" ".join(f"using ::{name};" for name in _MATH)} }}
#endif
"""


def find_clang() -> str:
    """The name of a clang++ for which all other packages are installed, too."""
    missing = {}
    for version in _CLANG_VERSIONS:
        missing[version] = _missing_packages(version)
        if not missing[version]:
            return f"clang++-{version}"
    best = min(missing, key=lambda version: len(missing[version]))
    raise BuildError(
        "there is no HIP compiler; install ROCm, so that hipcc is on PATH, or, to see only "
        f"whether everything compiles, apt-get install {' '.join(missing[best])}"
    )


def _missing_packages(version: int) -> list[str]:
    clang = f"clang-{version}"
    is_there = {
        clang: shutil.which(f"clang++-{version}") is not None,
        f"clang-tools-{version}": _has_tool(clang, "clang-offload-bundler"),
        f"lld-{version}": _has_tool(clang, "ld.lld"),
        "libamdhip64-dev": (_HEADERS / "hip_runtime.h").exists(),
        "rocm-device-libs": (_DEVICE_LIBRARIES / "ocml.bc").exists(),
    }
    return [package for package, found in is_there.items() if not found]


def _has_tool(clang: str, tool: str) -> bool:
    return bool(shutil.which(clang)) and Path(_ask(clang, f"-print-prog-name={tool}")).is_absolute()


def command(clang: str, work: Path) -> tuple[str, ...]:
    """The command that starts `clang`, with the flags that ROCm's hipcc would add."""
    headers = _made_once(work / "hip_headers", _make_headers)
    libraries = _made_once(
        work / "device_libraries", lambda folder: _make_device_libraries(clang, folder)
    )
    return (
        *(clang, "-x", "hip", "-nogpuinc", f"--rocm-device-lib-path={libraries}"),
        *("-isystem", str(headers), "-isystem", _ask(clang, "-print-resource-dir")),
        *("-include", str(headers / "shim.h")),
        # clang 22 no longer has this macro; gfx9 has wavefronts of 64.
        "-D__AMDGCN_WAVEFRONT_SIZE=64",
    )


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder. If it is missing, `make` fills it: completely, or it is not created."""
    if not folder.exists():
        draft = folder.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        make(draft)
        draft.rename(folder)
    return folder


def _make_headers(folder: Path) -> None:
    """Copy HIP's headers, with vectors made trivially copyable, as they are since ROCm 6."""
    shutil.copytree(_HEADERS, folder / "hip", symlinks=False)
    path = folder / "hip" / "amd_detail" / "amd_hip_vector_types.h"
    assignment = r"HIP_vector_base&\s+operator=\((?:const\s+HIP_vector_base&|HIP_vector_base&&)"
    text, changes = re.subn(
        rf"({assignment}\s*)\w*\s*\)\s*noexcept\s*\{{[^}}]*\}}",
        r"\1) = default;",
        path.read_text(encoding="utf-8"),
    )
    if not changes:
        raise BuildError(
            f"{_HEADERS} is not HIP {HIP_VERSION}, the one known here; install ROCm, or Debian "
            "bookworm's libamdhip64-dev"
        )
    path.write_text(text, encoding="utf-8")
    (folder / "shim.h").write_text(_SHIM, encoding="utf-8")


def _make_device_libraries(clang: str, folder: Path) -> None:
    shutil.copytree(_DEVICE_LIBRARIES, folder, dirs_exist_ok=True)
    for name, constant in _CONTROL_LIBRARIES.items():
        source = folder / f"{name}.ll"
        lines = [
            f"@{symbol} = linkonce_odr protected local_unnamed_addr addrspace(4) "
            f"constant {kind} {value}"
            for kind, symbol, value in (constant, _FLUSH_DENORMALS)
        ]
        triple = 'target triple = "amdgcn-amd-amdhsa"'
        source.write_text("\n".join([triple, *lines, ""]), encoding="utf-8")
        flags = "-x ir -target amdgcn-amd-amdhsa -nogpulib -emit-llvm -c".split()
        _ask(clang, *flags, str(source), "-o", str(folder / f"{name}.bc"))
        source.unlink()


def _ask(*arguments: str) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(arguments)} failed: {error.stderr.strip()}") from error
    return done.stdout.strip()
