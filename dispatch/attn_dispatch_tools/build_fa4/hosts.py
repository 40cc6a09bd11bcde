"""The machines for which the kernels' host code is compiled."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass

from attn_dispatch_tools.terminal.building import BuildError


@dataclass(frozen=True)
class Host:
    """A kind of machine: any Linux with a CPU of this architecture."""

    name: str
    machines: tuple[str, ...]
    """What Python calls them."""
    target: str
    """The oldest CPU, as LLVM names it. By default the kernels' compiler takes this machine's."""
    cross_compiler: str
    """The usual name of a C compiler for it elsewhere."""

    @property
    def is_this_machine(self) -> bool:
        return platform.machine() in self.machines

    def compiler(self) -> str:
        """The C compiler that links for it: $CC, or the first of the usual names on PATH."""
        usual = ("cc", "gcc", "clang") if self.is_this_machine else (self.cross_compiler,)
        for name in filter(None, (os.environ.get("CC"), *usual)):
            if found := shutil.which(name):
                return found
        install = "gcc" if self.is_this_machine else self.cross_compiler
        raise BuildError(
            f"there is no C compiler for {self.name}, which links the library; install {install} "
            "or set CC"
        )


HOSTS = {
    x.name: x
    for x in (
        Host(
            "x86-64",
            ("x86_64", "AMD64"),
            "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64",
            "x86_64-linux-gnu-gcc",
        ),
        Host(
            "aarch64",
            ("aarch64", "arm64"),
            "llvm -mtriple=aarch64-unknown-linux-gnu -mcpu=generic",
            "aarch64-linux-gnu-gcc",
        ),
    )
}
"""Every host by its name."""


def this_machine() -> Host:
    """The host that this machine is."""
    for host in HOSTS.values():
        if host.is_this_machine:
            return host
    raise BuildError(
        f"the kernels' host code is compiled for {' and '.join(HOSTS)}, and this is "
        f"{platform.machine()}; name one of these with --host"
    )
