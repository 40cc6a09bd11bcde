"""The CPU suite: `python -m pytest`. The GPU suite is `python -m pytest tests/gpu`."""

from __future__ import annotations

import gc
import os
import pathlib
import tempfile

# The float64 reference multiplies small matrices: BLAS's threads would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported

import jax
import pytest

from attn_dispatch import settings, warning
from attn_dispatch.core import call_warnings, select
from attn_dispatch_tools.verify.compiling import COMPILE_QUICKLY
from tests.support.ir_contexts import use_again

_GPU_SUITE = pathlib.Path(__file__).parent / "gpu"


def pytest_configure(config):
    """All but the GPU suite, asked for by name, runs on the CPU, on machines with a GPU too."""
    use_again()
    _take_own_cores(config)
    # What another version has kept must not make tests pass, nor theirs fill the user's folder.
    os.environ.setdefault("ATTN_DISPATCH_PLANS", "off")
    os.environ.setdefault("ATTN_DISPATCH_WINNERS", "off")
    paths = [pathlib.Path(argument.split("::")[0]).resolve() for argument in config.args]
    if any(path == _GPU_SUITE or _GPU_SUITE in path.parents for path in paths):
        return
    # In the environment, for the processes that tests start as well. LLVM's optimisations would
    # take longer than everything that they speed up.
    quickly = (f"--{flag}={str(value).lower()}" for flag, value in COMPILE_QUICKLY.items())
    os.environ.setdefault("XLA_FLAGS", " ".join(quickly))
    # Where in Python each operation was made: nobody reads that, and to write it down takes time.
    os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_include_full_tracebacks_in_locations", False)
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    _compile_once(config)


def _compile_once(config):
    """XLA compiles each program once in this process and those that its tests start.

    Many tests trace anew what another test has compiled. The folder is this process's, as JAX's
    files in it are not whole at once, and goes with it.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="compiled-")
    config.add_cleanup(folder.cleanup)
    for name, value in {
        "jax_compilation_cache_dir": folder.name,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


def _take_own_cores(config):
    """Each of several processes keeps to its share of the cores.

    XLA has a thread for every core that it sees, and on two cores the threads of two processes that
    wait for each other double what the suite takes.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    count, index = worker["workercount"], int(worker["workerid"].removeprefix("gw"))
    if own := sorted(os.sched_getaffinity(0))[index::count]:
        os.sched_setaffinity(0, own)


def pytest_collection_finish():
    """To walk over all that is imported again and again took a sixth of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def pytest_collection_modifyitems(items):
    """What takes longest goes first, so that no core is idle at last."""
    longest = (
        "cudnn/test_planning.py", "xla/test_conformance.py", "xla/test_draws.py",
        "core/test_meshes.py", "aiter/test_conformance.py", "aiter/test_dispatch.py",
        "core/rewrites/test_rewrites.py", "core/rewrites/test_whole_pages.py",
        "core/test_partitioning.py", "core/test_forward_mode.py", "tools/verify/test_judge.py",
    )  # fmt: skip
    items.sort(key=lambda item: not item.path.as_posix().endswith(longest))


@pytest.fixture
def without_rewrites():
    """Kernels run what they take as it is."""
    with settings.rewrites(False):
        yield


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch):
    """No setting of the caller's environment, and no warning already given, reaches a test."""
    monkeypatch.delenv("ATTN_DISPATCH_TARGET", raising=False)
    monkeypatch.delenv("ATTN_DISPATCH_FALLBACK", raising=False)
    monkeypatch.delenv("ATTN_DISPATCH_CHECK", raising=False)
    monkeypatch.delenv("ATTN_DISPATCH_REWRITES", raising=False)
    warning.forget()
    call_warnings.forget()
    select.is_installed.cache_clear()
