"""Finding the sources of AITER v0.1.15 or later in a folder: a checkout, or an installed wheel."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from attn_dispatch.aiter.release import text_of
from attn_dispatch.devices.aiter_versions import OLDEST, Version, version_of
from attn_dispatch_tools.terminal.building import BuildError

RECOMMENDED: Version = (0, 1, 19)

_MAIN = Path("csrc", "cpp_itfs", "mha_bwd.cu")
_FORWARD = Path("csrc", "cpp_itfs", "mha_fwd.cu")
_HEADER = Path("csrc", "include", "mha_bwd.h")
_HIP = Path("csrc", "include", "aiter_hip_common.h")
_KERNELS = Path("hsa", "gfx950", "fmha_v3_fwd")
_RELEASE = re.compile(r"v?[\d.]+(?:[.-]?post\d+)?")
"""The version of a release, and of no commit before or after it."""


@dataclass(frozen=True)
class Mark:
    """What shows that sources are of a version or newer."""

    since: Version
    path: Path
    pattern: str = ""
    """What the file holds since that version."""
    older: tuple[str, ...] = ()
    """Or the first digits of the file's SHA-256 in the versions before."""

    def is_in(self, root: Path) -> bool:
        """Whether the sources are of that version or newer."""
        content = (root / self.path).read_bytes()
        if self.older:
            return not hashlib.sha256(content).hexdigest().startswith(self.older)
        return re.search(self.pattern.encode(), content) is not None


MARKS = (
    Mark(OLDEST, _HEADER, r"\bworkspace_alloc\b"),
    Mark((0, 1, 16), _MAIN, r"\bKernelArgBufferWriter\b"),
    Mark((0, 1, 17), _HIP, r"\bcluster_x\b"),
    Mark(
        (0, 1, 18),
        _KERNELS / "fwd_hd192_hd128_bf16_causal.co",
        older=("56c5bd819b77", "6014f564d120"),
    ),
    Mark((0, 1, 19), _FORWARD, r"\bhdim_q == 256\b"),
    Mark((0, 1, 20), _KERNELS / "fwd_hd256_fp8.co", older=("101f09b39402",)),
)
"""v0.1.17 and v0.1.20 brought nothing that a call uses."""


@dataclass(frozen=True)
class Checkout:
    """The sources of AITER."""

    text: str
    """The version as it was found, such as "0.1.20.post1"."""
    version: Version
    root: Path
    """The folder with csrc and hsa."""

    @property
    def csrc(self) -> Path:
        return self.root / "csrc"

    @property
    def hsa(self) -> Path:
        return self.root / "hsa"


def find(folder: Path, version: str | None = None) -> Checkout:
    """The sources in a folder, and their version, which may be given.

    Raises:
      BuildError: the folder has no such sources, or they are too old or of no known version.
    """
    places = (folder, folder / "aiter_meta", folder.parent / "aiter_meta")
    root = next((x for x in places if (x / _MAIN).is_file()), None)
    if root is None:
        raise BuildError(
            f"--aiter: expected a checkout of AITER {text_of(OLDEST)} or newer, or the folder in "
            f"which its wheel is installed, and {folder} has no {_MAIN}, also not in aiter_meta"
        )
    text = version or _wheel_version(root) or _git_version(root)
    if not text or not (number := version_of(text)):
        raise BuildError(
            f"the version of AITER in {root} is not known (found {text or 'none'!r}); give it with "
            "--aiter-version, for example 0.1.19"
        )
    if number < OLDEST:
        raise BuildError(
            f"{root} is AITER {text}, and this needs {text_of(OLDEST)} or newer, better "
            f"{text_of(RECOMMENDED)}; without --aiter, build-aiter builds the release from PyPI"
        )
    _check_marks(root, text, number, is_exact=bool(version and _RELEASE.fullmatch(text)))
    return Checkout(text, number, root.resolve())


def _check_marks(root: Path, text: str, number: Version, *, is_exact: bool) -> None:
    """Refuse sources that are not of their version.

    A checkout between two releases has the version of the older one, and may have what the newer
    one brought. A release that is given must be that of the sources.
    """
    for mark in MARKS:
        since = text_of(mark.since)
        if not (root / mark.path).is_file():
            if mark.path.parts[0] == "hsa":
                continue  # a folder without the kernels of that architecture
            raise BuildError(f"{root} lacks {mark.path}: expected a whole checkout of AITER {text}")
        is_newer = mark.is_in(root)
        if number >= mark.since and not is_newer:
            raise BuildError(
                f"{root} is called AITER {text}, but {mark.path} there is older than that of "
                f"{since}: expected the version of these sources"
            )
        if is_exact and number < mark.since and is_newer:
            raise BuildError(
                f"{root} is called AITER {text}, but {mark.path} there is that of {since} or "
                "newer: expected the version of these sources"
            )


def _wheel_version(root: Path) -> str:
    """The version in the metadata beside the wheel's folder aiter_meta, or ""."""
    if root.name != "aiter_meta":
        return ""
    places = [str(root.parent)]
    found = next(iter(importlib.metadata.distributions(name="amd-aiter", path=places)), None)
    return found.version if found else ""


def _git_version(root: Path) -> str:
    """The last tag before the commit that is checked out, or ""."""
    command = ["git", "-C", str(root), "describe", "--tags", "--match", "v*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 and (root / ".git").exists() else ""
