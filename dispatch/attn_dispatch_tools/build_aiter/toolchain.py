"""The compiler: ROCm's hipcc, or an ordinary clang that shows only whether everything compiles."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_dispatch_tools.build_aiter import debian, flags
from attn_dispatch_tools.build_aiter.errors import BuildError

_OLDEST_HIP = (6, 0, 0)  # CK needs vectors that are trivially copyable


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
    if hipcc := _hipcc():
        return _rocm(hipcc, arch, work)
    return _clang(arch, work)


def _hipcc() -> str | None:
    """That of $ROCM_PATH, else the first on PATH, else that of /opt/rocm; None if there is none."""
    if root := os.environ.get("ROCM_PATH"):
        if found := shutil.which(str(Path(root, "bin", "hipcc"))):
            return found
        raise BuildError(
            f"ROCM_PATH={root} holds no bin/hipcc; set it to ROCm's folder, or unset it"
        )
    return shutil.which("hipcc") or shutil.which("/opt/rocm/bin/hipcc")


def _rocm(hipcc: str, arch: str, work: Path) -> Toolchain:
    text = output_of(hipcc, "--version")
    version = hip_version(text)
    name = f"hipcc of HIP {'.'.join(map(str, version))}"
    if version < _OLDEST_HIP:
        raise BuildError(
            f"{hipcc} is the {name}, and AITER needs ROCm 6 or newer; install it, and put its bin "
            "folder first on PATH or name ROCm's folder in ROCM_PATH"
        )
    wanted = flags.common(version)
    if not is_amd_clang(text):
        # A distribution's HIP with upstream's clang. What it builds runs, compiled less well.
        name += f" with a clang that is not AMD's ({clang_line(text)})"
        wanted = flags.without_amd_only(wanted)
    command = (hipcc, "-x", "hip", f"--offload-arch={arch}")
    known, unknown = _known_flags(command, wanted, work)
    return Toolchain(name, (*command, *known), (hipcc,), False, unknown)


def _clang(arch: str, work: Path) -> Toolchain:
    clang = debian.find_clang()
    command = (*debian.command(clang, work), f"--offload-arch={arch}")
    known, unknown = _known_flags(command, flags.upstream_clang(), work)
    version = output_of(clang, "--version")
    if is_amd_clang(version):
        raise BuildError(
            f"{clang} is AMD's clang, and there is no hipcc: put ROCm's bin folder on PATH, or "
            "name ROCm's folder in ROCM_PATH"
        )
    return Toolchain(
        f"{clang_line(version)} with Debian's HIP {debian.HIP_VERSION}",
        (*command, *known),
        (clang, "-lamdhip64"),
        compile_check_only=True,
        unknown_flags=unknown,
    )


def is_amd_clang(text: str) -> bool:
    """Whether what --version prints is of AMD's own clang, which knows flags of its own."""
    return "AMD clang" in text


def clang_line(text: str) -> str:
    """The line of --version that names the clang."""
    return next((x.strip() for x in text.splitlines() if "clang version" in x), "unknown")


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
