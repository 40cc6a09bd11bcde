"""Sequences spread over the devices of two processes, which exchange keys through sockets."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import jax
import pytest

from tests.core.context.two_processes import CASES
from tests.support.repository import ROOT, environment

SECONDS = 240
NO_COLLECTIVES = not hasattr(jax.config, "jax_cpu_collectives_implementation")

pytestmark = pytest.mark.skipif(NO_COLLECTIVES, reason="this JAX has no collectives between CPUs")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """What each process found. Both are ended if one does not end in time."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.core.context.two_processes", str(number), port],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        done = [x.communicate(timeout=SECONDS) for x in processes]
    finally:
        for x in processes:
            x.kill()
    for process, (_, errors) in zip(processes, done, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_equal_those_of_one_device(reports, name):
    for report in reports:
        assert {x: y for x, y in report[name].items() if not y <= 1e-5} == {}
