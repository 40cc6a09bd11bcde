"""Finding the compiler: ROCm's hipcc, or Debian's clang, which only checks that all compiles."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_dispatch_tools.build_aiter import debian, flags
from attn_dispatch_tools.terminal.building import BuildError

_OLDEST_HIP = (6, 0, 0)  # CK needs vectors that are trivially copyable


@dataclass(frozen=True)
class Toolchain:
    """How to compile and link HIP code."""

    description: str
    compile: tuple[str, ...]
    """The compiler and the flags that all libraries share."""
    link: tuple[str, ...]
    """The command that links objects, and the libraries that they need."""
    compile_check_only: bool = False
    """Whether the result must not be run, because the headers are not those of a real ROCm."""
    unknown_flags: tuple[str, ...] = ()
    """AITER's flags that this compiler does not know. They are left out."""
    hip: tuple[int, ...] = ()
    """hipcc's version of HIP; empty without hipcc."""


def find(arch: str, work: Path) -> Toolchain:
    """hipcc if ROCm is installed, else Debian's clang and HIP, whose files are kept in `work`."""
    if hipcc := _hipcc():
        return _rocm(hipcc, arch, work)
    return _clang(arch, work)


def _hipcc() -> str | None:
    """The path of hipcc: from $ROCM_PATH, else from PATH, else from /opt/rocm; None if missing.

    Raises:
      BuildError: $ROCM_PATH is set, but has no hipcc.
    """
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
        # A distribution's HIP has upstream's clang, whose kernels run, but are less optimized.
        name += f" with a clang that is not AMD's ({clang_line(text)})"
        wanted = flags.without_amd_only(wanted)
    command = (hipcc, "-x", "hip", f"--offload-arch={arch}")
    known, unknown = _known_flags(command, wanted, work)
    return Toolchain(name, (*command, *known), (hipcc,), False, unknown, version)


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
    """Whether the output of --version is that of AMD's clang, which knows additional flags."""
    return "AMD clang" in text


def clang_line(text: str) -> str:
    """The line of the output of --version that names the clang."""
    return next((x.strip() for x in text.splitlines() if "clang version" in x), "unknown")


def hip_version(text: str) -> tuple[int, ...]:
    """The version of HIP in the output of `hipcc --version`, such as (7, 1, 25424)."""
    match = re.search(r"HIP version: (\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"hipcc --version names no HIP version; it printed: {text.strip()!r}")
    return tuple(map(int, match.groups()))


def _known_flags(
    command: tuple[str, ...], wanted: Sequence[str], work: Path
) -> tuple[list[str], tuple[str, ...]]:
    """The flags of `wanted` that the compiler accepts, and those that it rejects.

    AITER's own build tests its flags in the same way.
    """
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
    """The output of a command.

    Raises:
      BuildError: the command fails.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(command)} failed: {error.stderr.strip()}") from error
