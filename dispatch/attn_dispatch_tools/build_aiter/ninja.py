"""Compiling and linking with ninja, which builds only what is missing or out of date."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attn_dispatch_tools.build_aiter.toolchain import Toolchain
from attn_dispatch_tools.terminal.building import BuildError

WRAPPED = tuple(
    f"-Wl,--wrap={name}"
    for name in (
        "getenv",
        "hipGetDeviceProperties",
        "hipGetDevicePropertiesR0600",
        "hipModuleLoad",
        "hipModuleGetFunction",
        "hipModuleLaunchKernel",
    )
)
"""Linker flags for the functions that rocm_backend/aiter_environment.cc replaces. HIP 6 renamed one
of them."""


@dataclass(frozen=True)
class Library:
    """One shared library."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Libraries of the same build that it is linked with."""
    wrapped: tuple[str, ...] = ()
    """Linker flags with which a source replaces functions of other libraries."""
    flags_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further compiler flags for single sources, by file name."""

    def objects(self) -> list[tuple[Path, Path]]:
        """Each source with its object, relative to the build folder."""
        folder = Path("objects", Path(self.name).stem)
        return [(source, folder / f"{source.stem}.o") for source in self.sources]


Report = Callable[[int, int, str], None]
"""Called with the number of steps done, the number of all steps, and the name of the last step."""


def write(folder: Path, toolchain: Toolchain, libraries: Sequence[Library]) -> None:
    """Write build.ninja into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    linker, *link_libraries = map(shlex.quote, toolchain.link)
    compiler = " ".join(map(shlex.quote, toolchain.compile))
    lines = [
        "ninja_required_version = 1.5",
        "",
        "rule compile",
        f"  command = {_escape_variable(compiler)} $flags -MMD -MF $out.d -c $in -o $out",
        "  description = $name",
        "  depfile = $out.d",
        "  deps = gcc",
        "",
        "rule link",
        # -z defs: if a kernel that the dispatch mentions is missing, linking fails.
        f"  command = {_escape_variable(linker)} -shared -Wl,-z,defs -Wl,-soname,$out "
        "-Wl,-rpath,'$$ORIGIN' $wrapped -o $out @$out.rsp $needs "
        + _escape_variable(" ".join(link_libraries)),
        "  description = $out",
        "  rspfile = $out.rsp",
        "  rspfile_content = $in",
        *(line for library in libraries for line in _library(library)),
        "",
    ]
    (folder / "build.ninja").write_text("\n".join(lines), encoding="utf-8")


def _library(library: Library) -> Iterator[str]:
    for source, target in library.objects():
        flags = (*library.flags, *library.flags_of.get(source.name, ()))
        yield ""
        yield f"build {_escape_path(target)}: compile {_escape_path(source)}"
        yield f"  flags = {_escape_variable(' '.join(map(shlex.quote, flags)))}"
        yield f"  name = {_escape_variable(source.name)}"
    objects = " ".join(_escape_path(target) for _, target in library.objects())
    needs = " ".join(library.needs)
    yield ""
    yield f"build {library.name}: link {objects}{' | ' * bool(needs)}{needs}"
    yield f"  needs = {needs}"
    yield f"  wrapped = {' '.join(library.wrapped)}"


def _escape_path(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def _escape_variable(text: str) -> str:
    return text.replace("$", "$$")


def find_ninja() -> str:
    """The path of ninja: from PATH, else where pip installs it, beside Python."""
    beside = Path(sys.executable).with_name("ninja")
    found = shutil.which("ninja") or (str(beside) if beside.exists() else None)
    if found is None:
        raise BuildError("there is no ninja, which runs the build; pip install ninja")
    return found


def run(folder: Path, jobs: int, report: Report) -> None:
    """Build what is missing or out of date.

    An interrupt is passed on to ninja, which then removes the files that it was writing.
    """
    command = [find_ninja(), "-j", str(jobs)]
    last: deque[str] = deque(maxlen=40)
    with subprocess.Popen(
        command,
        cwd=folder,
        # ninja begins the line of each step with this: steps done / all steps.
        env={**os.environ, "NINJA_STATUS": "@%f/%t@"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if step := re.match(r"@(\d+)/(\d+)@(.*)", line):
                    report(int(step[1]), int(step[2]), step[3])
                else:
                    last.append(line.rstrip())
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if process.returncode:
        # The compiler's long command line would hide what matters.
        lines = [line for line in last if " -MMD -MF " not in line]
        raise BuildError(
            "the build failed; the same command continues it. Its last lines are:\n"
            + "\n".join(lines)
        )
