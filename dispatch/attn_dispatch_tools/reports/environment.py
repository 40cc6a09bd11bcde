"""The environment of a measurement: device and versions, for reports and committed results."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jaxlib.version import __version__ as JAXLIB_VERSION

from attn_dispatch._version import __version__
from attn_dispatch.aiter import folder as aiter_folder
from attn_dispatch.cudnn import library as cudnn_library

_SECONDS = 60.0
"""The time limit for each run of git or nvidia-smi."""


def environment() -> dict[str, Any]:
    """The date, device, driver and versions. The commit is $ATTN_DISPATCH_COMMIT, else git's."""
    library = cudnn_library.find()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("ATTN_DISPATCH_COMMIT") or _commit(),
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].client.platform_version.splitlines()[0],
        "driver": _driver(),
        "cudnn": library.version_text if library.is_usable else library.unusable_reason,
        "cudnn_path": _in_its_package(library.path),
        "aiter": _aiter(),
        "jax": jax.__version__,
        "jaxlib": JAXLIB_VERSION,
        "python": platform.python_version(),
        "attn_dispatch": __version__,
    }


def file_name(kind: str, facts: Mapping[str, Any]) -> str:
    """The name of a file of results, without suffix, such as "speed-NVIDIA_H200-9_28_0".

    It consists of the kind, the device, and cuDNN's version if cuDNN is usable.
    """
    facts = {name: re.sub(r"\W", "_", facts[name]) for name in ("device", "cudnn")}
    parts = [kind, facts["device"]]
    if facts["cudnn"][:1].isdigit():  # otherwise it is the reason why cuDNN is not usable
        parts.append(facts["cudnn"])
    return "-".join(parts)


def _commit() -> str:
    """The commit of the checkout that this file belongs to, with a + if files have changed."""
    here = Path(__file__)
    git = ("git", "-C", str(here.parent))
    if _run(*git, "ls-files", "--error-unmatch", here.name) == "unknown":
        return "unknown"  # the package is installed, perhaps within another repository
    changed = _run(*git, "status", "--porcelain", "--untracked-files=no")
    return _run(*git, "rev-parse", "HEAD") + ("+" if changed != "unknown" else "")


def _driver() -> str:
    version = Path("/sys/module/amdgpu/version")
    if version.is_file():
        return version.read_text().strip()
    return _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _aiter() -> str:
    """The versions that AITER was built from here, by architecture."""
    builds = {arch: aiter_folder.read(aiter_folder.folder(arch)) for arch in aiter_folder.ARCHS}
    found = [f"{build.wheel_version} for {arch}" for arch, build in builds.items() if build]
    return ", ".join(found) or "not built here"


def _in_its_package(path: str) -> str:
    """A file's path within site-packages, or only its name, to leave out the machine's folders."""
    before, found, inside = path.partition("site-packages/")
    return inside if found else before.rsplit("/", 1)[-1]


def cuda_devices() -> list[Any]:
    """The CUDA devices of this process; empty where there are none."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def _run(*command: str) -> str:
    """The first line that a command prints; "unknown" if it fails or prints nothing."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"
