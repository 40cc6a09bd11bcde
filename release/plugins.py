"""The wheels of the shared libraries: their names, contents and requirements."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = REPOSITORY / "build" / "release"
DIST = BUILD / "dist"

VERSION = re.findall(
    r'"(.*)"', (REPOSITORY / "dispatch" / "attn_dispatch" / "_version.py").read_text()
)[0]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "manylinux_2_27_x86_64"
OLDEST_JAX = "0.10.2"


@dataclass(frozen=True)
class Plugin:
    """A wheel with one shared library and the files that it needs beside it."""

    suffix: str
    library: str
    switch: str
    """The CMake option that builds the library."""
    description: str
    requires: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"attn-dispatch-{self.suffix}"

    @property
    def package(self) -> str:
        return self.name.replace("-", "_")


def _cuda(major: int) -> Plugin:
    return Plugin(
        f"cuda{major}",
        "_cuda",
        "ATTN_DISPATCH_CUDA",
        f"attn-dispatch's library for JAX on CUDA {major}.",
        # cuDNN's lower bound is that of cuda_backend/library.cc; JAX's own may be higher.
        (f"jax[cuda{major}]>={OLDEST_JAX}", f"nvidia-cudnn-cu{major}>=9.12,<10"),
    )


# One library serves CUDA 12 and 13: it does not link CUDA, and loads cuDNN when it needs it.
PLUGINS = (
    _cuda(13),
    _cuda(12),
    Plugin(
        "rocm",
        "_rocm",
        "ATTN_DISPATCH_ROCM",
        "attn-dispatch's library for JAX on ROCm.",
        ("ninja", "rich"),  # what build-aiter needs, as in the extra `rocm`
    ),
)
