"""The compiler: ROCm's hipcc, or an ordinary clang that shows only whether everything compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_dispatch.aiter.build import debian, flags
from attn_dispatch.aiter.build.errors import BuildError


@dataclass(frozen=True)
class Toolchain:
    """How to compile and link HIP code."""

    description: str
    compile: tuple[str, ...]
    """The compiler with every flag but the library's own."""
    link: tuple[str, ...]
    """The compiler, ready for objects, and the libraries they need."""
    compile_check_only: bool = False
    """What it builds must not run: its headers are not those of the ROCm that would run it."""
    unknown_flags: tuple[str, ...] = ()
    """Flags of AITER's that this compiler does not know, and does without."""


def find(arch: str, work: Path) -> Toolchain:
    """hipcc where ROCm is installed, else Debian's clang and HIP; `work` keeps what that needs."""
    if hipcc := shutil.which("hipcc") or shutil.which("/opt/rocm/bin/hipcc"):
        return _rocm(hipcc, arch, work)
    return _clang(arch, work)


def _rocm(hipcc: str, arch: str, work: Path) -> Toolchain:
    version = hip_version(output_of(hipcc, "--version"))
    command = (hipcc, "-x", "hip", f"--offload-arch={arch}")
    known, unknown = _known_flags(command, flags.common(version), work)
    name = f"hipcc of HIP {'.'.join(map(str, version))}"
    return Toolchain(name, (*command, *known), (hipcc,), False, unknown)


def _clang(arch: str, work: Path) -> Toolchain:
    clang = debian.find_clang()
    command = (*debian.command(clang, work), f"--offload-arch={arch}")
    known, unknown = _known_flags(command, flags.upstream_clang(), work)
    version = output_of(clang, "--version").splitlines()[0]
    return Toolchain(
        f"{version} with Debian's HIP {debian.HIP_VERSION}",
        (*command, *known),
        (clang, "-lamdhip64"),
        compile_check_only=True,
        unknown_flags=unknown,
    )


def hip_version(text: str) -> tuple[int, ...]:
    """(7, 1, 25424) from what hipcc --version prints."""
    match = re.search(r"HIP version: (\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"hipcc --version names no HIP version; it printed: {text.strip()!r}")
    return tuple(map(int, match.groups()))


def _known_flags(
    command: tuple[str, ...], wanted: Sequence[str], work: Path
) -> tuple[list[str], tuple[str, ...]]:
    """What the compiler takes of `wanted`, and what it refuses. AITER's own build asks so too."""
    work.mkdir(parents=True, exist_ok=True)
    empty = work / "empty.hip"
    empty.touch()

    def refusal(*tried: str) -> str:
        done = subprocess.run(
            [*command, *tried, "-fsyntax-only", str(empty)],
            capture_output=True,
            text=True,
            check=False,
        )
        return (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""

    if not refusal(*wanted):
        return list(wanted), ()
    if reason := refusal():
        raise BuildError(f"{command[0]} cannot compile an empty HIP file; it says: {reason}")
    unknown = tuple(flag for flag in wanted if refusal(flag))
    return [flag for flag in wanted if flag not in unknown], unknown


def output_of(*command: str) -> str:
    """What a command prints."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(command)} failed: {error.stderr.strip()}") from error
