"""The package that brings the kernels, found without importing it, and its library loaded.

Its own module loads both generations' libraries, 350 MB, wherever it is imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import lru_cache
from pathlib import Path

import jax

from attn_dispatch.devices.packages import unknown_version, version_of

NAME = "dew-flash-attn"
DISTRIBUTIONS = ("dew-flash-attn-cu13", "dew-flash-attn-cu12")
OLDEST, FIRST_UNKNOWN = "0.3.6", "0.4"
"""The versions between which its arguments are those that were read from the oldest: they are no
public interface."""

FORWARD_TARGET = "attn_dispatch_flash_forward"
BACKWARD_TARGET = "attn_dispatch_flash_backward"
PACKED = "_packed"
"""What the names of the same for packed sequences end with."""

_LIBRARY = "libdew_flash_attn3.so"
_SYMBOLS = {
    FORWARD_TARGET: "dew_flash3_mha_fwd",
    BACKWARD_TARGET: "dew_flash3_mha_bwd",
    FORWARD_TARGET + PACKED: "dew_flash3_mha_varlen_fwd",
    BACKWARD_TARGET + PACKED: "dew_flash3_mha_varlen_bwd",
}
TARGETS = tuple(_SYMBOLS)


@lru_cache(maxsize=1)
def version() -> str | None:
    """The package's version; None where it is not installed."""
    return version_of(*DISTRIBUTIONS)


def unusable_reason() -> str:
    """Why there are no kernels of it here; empty if there are."""
    found = version()
    if found is None:
        return f"not installed: pip install {DISTRIBUTIONS[0]}"
    return unknown_version(NAME, found, OLDEST, FIRST_UNKNOWN)


def loading_failure() -> str:
    """Why the library cannot be loaded on this machine, which has such a GPU; empty if it can."""
    try:
        _loaded()
    except OSError as error:
        return f"dew-flash-attn's library cannot be loaded: {error}"
    return ""


@lru_cache(maxsize=1)
def register() -> None:
    """Make the kernels known to XLA.

    Raises:
      OSError: the library cannot be loaded.
    """
    library = _loaded()
    for target, symbol in _SYMBOLS.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(library[symbol]), platform="CUDA")


@lru_cache(maxsize=1)
def _loaded() -> ctypes.CDLL:
    """Kept once it is; a failure is not: memory may be free again."""
    return ctypes.CDLL(str(_folder() / _LIBRARY))


def _folder() -> Path:
    spec = importlib.util.find_spec("dew_flash_attn")
    if spec is None or spec.origin is None:
        raise OSError("its package is installed and cannot be found")
    return Path(spec.origin).parent
