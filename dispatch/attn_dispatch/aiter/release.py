"""The releases of AITER that this version works with, by the generation of their C++ interface."""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.devices import aiter_versions
from attn_dispatch.devices.aiter_versions import Version


@dataclass(frozen=True)
class Release:
    """AITER as it was built, or will be: what its kernels and its C++ interface depend on."""

    generation: str
    """The version that introduced the C++ interface."""
    version: Version

    @property
    def has_ck(self) -> bool:
        """Whether CK's kernels are built, and not ASM's alone."""
        return self.generation == "dev18"

    @property
    def takes_prefix_sums(self) -> bool:
        """Whether lengths of packed sequences with gaps are given as prefix sums."""
        return self.generation != "dev18"

    @property
    def doubt(self) -> str:
        """What to say of a release that is newer than any that was tried; empty for the others."""
        newest = aiter_versions.NEWEST
        if self.version <= newest:
            return ""
        mine = text_of(self.version)
        return f"AITER {mine} has not been tried; the newest that was is {text_of(newest)}"


DEV18 = Release("dev18", aiter_versions.DEV18)
"""The release that calls are planned for where AITER is not built."""

GENERATIONS = ("v0.1.15", "dev18")
"""The newest first, which is used where several are built."""


def text_of(version: Version) -> str:
    """The version as AITER's tags have it."""
    return f"v{'.'.join(map(str, version))}"
