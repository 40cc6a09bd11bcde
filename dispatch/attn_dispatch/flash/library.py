"""Finds dew-flash-attn without importing it, and loads the library of one generation.

Importing the package would load the libraries of both generations, 350 MB.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
import sys
from functools import lru_cache
from pathlib import Path

import jax

from attn_dispatch.devices import code_files
from attn_dispatch.devices.native_libraries import cuda_majors
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
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def unusable_reason() -> Reason | None:
    """Why the package's kernels cannot be used here; None if they can."""
    found, (oldest, first_unknown) = version(), VERSIONS
    if found is None:
        # JAX 0.11.2, which the package needs, needs Python 3.12.
        needs = ", which needs Python 3.12" if sys.version_info < (3, 12) else ""
        remedy = f"pip install dew-flash-attn-cu{cuda_majors()[0]}{needs}"
        text = f"{NAME} is not installed"
        return Reason("flash/library", (("installed", ""),), text, remedy)
    if _numbers(oldest) <= _numbers(found) < _numbers(first_unknown):
        return None
    text = f"{NAME} from {oldest} to below {first_unknown} is needed, and {found} is installed"
    return Reason("flash/library", (("installed", found),), text)


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


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release: (0, 3, 6) for "0.3.6+cu130"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
