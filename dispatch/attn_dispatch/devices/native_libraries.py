"""The shared libraries `_cuda` and `_rocm`: built into this package, or in a wheel beside it.

A build from the checkout puts them into attn_dispatch itself. Otherwise they come from the wheels
attn-dispatch-cuda13, attn-dispatch-cuda12 or attn-dispatch-rocm, which hold nothing else and must
have this package's version. docs/install.md describes both.
"""

from __future__ import annotations

import importlib
import importlib.machinery
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from attn_dispatch._version import __version__

PACKAGE = "attn_dispatch"


@dataclass(frozen=True)
class Native:
    """One of the libraries, and the wheels that contain it."""

    name: str
    vendor: str
    switch: str
    """The environment variable that includes it in a build from the checkout."""
    plugins: Callable[[], tuple[str, ...]]
    """Import names of the wheels, the preferred one first."""

    @property
    def remedy(self) -> str:
        wheel = self.plugins()[0].replace("_", "-")
        return (
            f"reinstall it with {self.switch}=1 in the environment, or install {wheel} "
            f"{__version__} beside it"
        )


def cuda_majors() -> tuple[int, int]:
    """13 and 12, with the version of the installed JAX first. JAX itself prefers 13."""
    has_13, has_12 = (find_spec(f"jax_cuda{x}_plugin") is not None for x in (13, 12))
    return (12, 13) if has_12 and not has_13 else (13, 12)


def _cuda_plugins() -> tuple[str, ...]:
    return tuple(f"{PACKAGE}_cuda{major}" for major in cuda_majors())


class NotBuilt(ModuleNotFoundError):
    """This Python has no such library. The message has a remedy."""

    def __init__(self, state: str, remedy: str, error: ImportError) -> None:
        super().__init__(f"{state}; {remedy} ({error})")
        self.state = state
        """What is missing, without the remedy."""


CUDA = Native("_cuda", "CUDA", "ATTN_DISPATCH_CUDA", _cuda_plugins)
ROCM = Native("_rocm", "ROCm", "ATTN_DISPATCH_ROCM", lambda: (f"{PACKAGE}_rocm",))


def load(native: Native) -> ModuleType:
    """The library's module: from this package, or else from the first installed wheel.

    Raises:
      NotBuilt: there is none for this Python.
      ModuleNotFoundError: the one in the wheel has another version than this package.
      ImportError: importing it failed. The failure may be transient.
    """
    plugin = next((x for x in native.plugins() if find_spec(x) is not None), None)
    if plugin is None or find_spec(f"{PACKAGE}.{native.name}") is not None:
        return _imported(native, PACKAGE, Path(__file__).parents[1])
    package = importlib.import_module(plugin)
    version = getattr(package, "__version__", "unknown")
    if version != __version__:
        wheel = plugin.replace("_", "-")
        raise ModuleNotFoundError(
            f"{wheel} does not fit this attn-dispatch: expected version {__version__}, got "
            f"{version}; install both of one version, or remove {wheel}"
        )
    return _imported(native, plugin, Path(str(package.__file__)).parent)


def plugin_folders(native: Native) -> list[Path]:
    """The folders of a library's installed wheels."""
    found = (find_spec(x) for x in native.plugins())
    return [Path(x.origin).parent for x in found if x is not None and x.origin is not None]


def _imported(native: Native, package: str, folder: Path) -> ModuleType:
    try:
        return importlib.import_module(f"{package}.{native.name}")
    except ImportError as error:
        raise _import_failure(native, folder, error) from error


def _import_failure(native: Native, folder: Path, error: ImportError) -> ImportError:
    """Says whether the library is missing, is for another Python, or could not be imported."""
    others = [x.name.split(".")[1] for x in folder.glob(f"{native.name}.*.so")]
    this = importlib.machinery.EXTENSION_SUFFIXES[0].split(".")[1]
    if others and this not in others:
        return NotBuilt(
            f"attn_dispatch's {native.vendor} library was built for another Python: expected "
            f"{this}, got {', '.join(sorted(others))}",
            native.remedy,
            error,
        )
    if isinstance(error, ModuleNotFoundError):
        state = f"attn_dispatch was installed without its {native.vendor} library"
        return NotBuilt(state, native.remedy, error)
    return ImportError(
        f"attn_dispatch's {native.vendor} library could not be imported; {native.remedy} ({error})"
    )
