"""The releases of AITER that this version works with, by the generation of their C++ interface."""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int, int]

OLDEST: Version = (0, 1, 15)
"""The oldest version of generation v0.1.15."""


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


DEV18 = Release("dev18", (0, 1, 7))
"""The release that calls are planned for where AITER is not built."""

GENERATIONS = ("v0.1.15", "dev18")
"""The newest first, which is used where several are built."""


def version_of(text: str) -> Version | None:
    """The version in texts such as "v0.1.19", "0.1.20.post1" or "0.1.20.dev3+g1234"; None if there
    is none. A development version comes before the release whose number it has."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    if found is None:
        return None
    major, minor, patch = map(int, found.groups())
    is_before = re.search(r"\.dev|-rc|rc\d", text) is not None and ".post" not in text
    return major, minor, max(patch - is_before, 0)


def text_of(version: Version) -> str:
    """The version as AITER's tags have it."""
    return f"v{'.'.join(map(str, version))}"
