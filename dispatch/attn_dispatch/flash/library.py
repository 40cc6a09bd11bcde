"""Finds dew-flash-attn without importing it, and loads the library of one generation.

Importing the package would load the libraries of both generations, 350 MB.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import lru_cache
from pathlib import Path

import jax

from attn_dispatch.devices import code_files
from attn_dispatch.devices.native_libraries import cuda_majors
from attn_dispatch.devices.packages import package_reason, version_of
from attn_dispatch.flash.generations import ALL, Generation
from attn_dispatch.reason import Reason

NAME = "dew-flash-attn"
DISTRIBUTIONS = ("dew-flash-attn-cu13", "dew-flash-attn-cu12")
VERSIONS = "0.3.6", "0.4"
"""The range of versions with the known arguments. These are no public interface; they were read
from the oldest version."""

TARGETS = tuple(target.name for generation in ALL for target in generation.targets)


@lru_cache(maxsize=1)
def version() -> str | None:
    """The package's version; None where it is not installed."""
    return version_of(*DISTRIBUTIONS)


def unusable_reason() -> Reason | None:
    """Why the package's kernels cannot be used here; None if they can."""
    distribution = f"dew-flash-attn-cu{cuda_majors()[0]}"
    return package_reason("flash/library", NAME, version(), VERSIONS, distribution)


def loading_failure(generation: Generation) -> str:
    """Why the package's library cannot be loaded here, beside such a GPU; empty if it can."""
    try:
        _loaded(generation)
    except OSError as error:
        return f"dew-flash-attn's library cannot be loaded: {error}"
    return ""


@lru_cache
def register(generation: Generation) -> None:
    """Register the generation's custom calls with XLA.

    Raises:
      OSError: the library cannot be loaded.
    """
    library = _loaded(generation)
    for target in generation.targets:
        handler = jax.ffi.pycapsule(library[target.symbol])
        jax.ffi.register_ffi_target(target.name, handler, platform="CUDA")


@lru_cache
def _loaded(generation: Generation) -> ctypes.CDLL:
    """The loaded library. It is cached, but a failure is not: memory may be free later."""
    path = _folder() / generation.library
    if problem := code_files.library_problem(path, is_named=False):
        raise OSError(problem)
    return ctypes.CDLL(str(path))


def _folder() -> Path:
    spec = importlib.util.find_spec("dew_flash_attn")
    if spec is None or spec.origin is None:
        raise OSError("the package is installed, but its module cannot be found")
    return Path(spec.origin).parent
