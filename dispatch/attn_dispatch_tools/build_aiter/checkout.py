"""Finding the sources of AITER v0.1.15 or later in a folder: a checkout, or an installed wheel."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from attn_dispatch.aiter.release import OLDEST, Version, text_of, version_of
from attn_dispatch_tools.build_aiter.errors import BuildError

RECOMMENDED: Version = (0, 1, 19)

_MAIN = Path("csrc", "cpp_itfs", "mha_bwd.cu")
_HEADER = Path("csrc", "include", "mha_bwd.h")


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
    if number >= OLDEST and not _asks_for_scratch(root):
        raise BuildError(
            f"{root} is called AITER {text}, but {_HEADER} there is not that of {text_of(OLDEST)} "
            "or newer: expected a whole checkout"
        )
    if number < OLDEST:
        raise BuildError(
            f"{root} is AITER {text}, and this needs {text_of(OLDEST)} or newer, better "
            f"{text_of(RECOMMENDED)}; without --aiter, build-aiter builds the release from PyPI"
        )
    return Checkout(text, number, root.resolve())


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


def _asks_for_scratch(root: Path) -> bool:
    """Whether mha_bwd asks its caller for scratch, as it does since v0.1.15."""
    header = root / _HEADER
    return header.is_file() and bool(
        re.search(r"\bworkspace_alloc\b", header.read_text(encoding="utf-8", errors="replace"))
    )
