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

from attn_dispatch import setting_blocks, warning
from attn_dispatch.core import call_warnings, select
from attn_dispatch_tools.verify.compiling import COMPILE_QUICKLY
from tests.support.ir_contexts import reuse_contexts

_GPU_SUITE = pathlib.Path(__file__).parent / "gpu"


def pytest_configure(config):
    """Run tests on the CPU, on machines with a GPU too, unless the GPU suite is asked for."""
    _take_share_of_cores(config)
    # Files of another version must not make tests pass, and tests must not fill the user's folder.
    os.environ.setdefault("ATTN_DISPATCH_WINNERS", "off")
    paths = [pathlib.Path(argument.split("::")[0]).resolve() for argument in config.args]
    if any(path == _GPU_SUITE or _GPU_SUITE in path.parents for path in paths):
        os.environ.setdefault("ATTN_DISPATCH_PLANS", "off")
        return
    # Not in the GPU suite: a program that the partitioner splits must not share its context with
    # the parts, which JAX lowers meanwhile. The CPU suite runs such programs in other processes.
    reuse_contexts()
    _share_plans(config)
    # Kernels that the user has compiled must not run calls of tests.
    os.environ.setdefault("ATTN_DISPATCH_FA4_LIBRARY", os.devnull)
    # The environment also reaches the processes that tests start. LLVM's optimisations would take
    # longer than they save.
    quickly = (f"--{flag}={str(value).lower()}" for flag, value in COMPILE_QUICKLY.items())
    os.environ.setdefault("XLA_FLAGS", " ".join(quickly))
    # Nobody reads the Python location of each operation, and writing it takes time.
    os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_include_full_tracebacks_in_locations", False)
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def _share_plans(config):
    """Let cuDNN plan each call once for all test processes, which takes it 0.4 s of a core.

    They inherit the folder from the process that starts them, which removes it at the end.
    """
    if "ATTN_DISPATCH_PLANS" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="plans-")
        config.add_cleanup(folder.cleanup)
        os.environ["ATTN_DISPATCH_PLANS"] = folder.name


def _take_share_of_cores(config):
    """Keep each of several test processes to its share of the cores.

    XLA starts a thread for every core that it sees. On two cores the threads of two processes wait
    for each other, which doubles the time of the suite.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    count, index = worker["workercount"], int(worker["workerid"].removeprefix("gw"))
    if share := sorted(os.sched_getaffinity(0))[index::count]:
        os.sched_setaffinity(0, share)


def pytest_collection_finish():
    """Keep imported objects from the garbage collector, which took a sixth of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def pytest_collection_modifyitems(items):
    """Run the longest files first, so that no core is idle at the end."""
    longest = (
        "cudnn/test_planning.py", "xla/test_conformance.py", "xla/test_draws.py",
        "core/test_meshes.py", "aiter/test_conformance.py", "aiter/test_rules_against_aiter.py",
        "core/rewrites/test_rewrites.py", "core/rewrites/test_whole_pages.py",
        "core/test_partitioning.py", "core/test_forward_mode.py", "tools/verify/test_judge.py",
        "tools/verify/test_verify.py", "serve/test_serve.py", "flash/test_flash.py",
    )  # fmt: skip
    items.sort(key=lambda item: not item.path.as_posix().endswith(longest))


@pytest.fixture
def without_rewrites():
    """Switch rewrites off: a kernel runs only the calls that it takes as they are."""
    with setting_blocks.rewrites(False):
        yield


@pytest.fixture(autouse=True)
def _default_settings(monkeypatch):
    """Hide settings in the caller's environment, and forget the warnings already given."""
    monkeypatch.delenv("ATTN_DISPATCH_TARGET", raising=False)
    monkeypatch.delenv("ATTN_DISPATCH_FALLBACK", raising=False)
    monkeypatch.delenv("ATTN_DISPATCH_CHECK", raising=False)
    monkeypatch.delenv("ATTN_DISPATCH_REWRITES", raising=False)
    warning.forget()
    call_warnings.forget()
    select.is_installed.cache_clear()
