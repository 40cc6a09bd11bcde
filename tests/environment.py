"""Where and with what something was measured, for the committed results."""

from __future__ import annotations

import datetime
import os
import subprocess
from typing import Any

import jax
from jaxlib.version import __version__ as JAXLIB_VERSION

import attn_dispatch
from attn_dispatch import cudnn_library


def environment() -> dict[str, Any]:
    """Date, device, driver and versions; the commit from git, or from $ATTN_DISPATCH_COMMIT."""
    library = cudnn_library.find()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("ATTN_DISPATCH_COMMIT") or _run("git", "rev-parse", "HEAD"),
        "device": jax.devices()[0].device_kind,
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cudnn": library.version_text if library.is_usable else library.unusable,
        "cudnn_path": _in_its_package(library.path),
        "jax": jax.__version__,
        "jaxlib": JAXLIB_VERSION,
        "attn_dispatch": attn_dispatch.__version__,
    }


def _in_its_package(path: str) -> str:
    """Where a file is inside of site-packages, or its name alone: not the machine's own folders."""
    before, found, inside = path.partition("site-packages/")
    return inside if found else before.rsplit("/", 1)[-1]


def cuda_devices() -> list[Any]:
    """The CUDA devices of this process; empty where there are none."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"
