"""The report of a module that needs a process with other devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.repository import ROOT, environment


def report_of(module: str, *arguments: str, devices: int | None = None) -> Any:
    """The last line that a module prints, which is JSON.

    `devices`: virtual devices on a CPU, unless the module asks for them itself.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    variables = {} if devices is None else {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(**variables), cwd=ROOT, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def report_with_cuda_plugin(module: str) -> Any:
    """`report_of` a module that compiles for GPUs that are not here; its argument is the folder of
    JAX's CUDA plugin. Skips the test if there is no such folder."""
    folder = os.environ.get("ATTN_DISPATCH_TEST_CUDA_PLUGIN", "")
    if not os.path.isdir(folder):
        pytest.skip("ATTN_DISPATCH_TEST_CUDA_PLUGIN names no folder with JAX's CUDA plugin")
    return report_of(module, folder)
