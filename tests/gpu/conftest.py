"""The GPU suite, which `python -m pytest tests/gpu` runs. With --out it writes a report as JSON.

ATTN_DISPATCH_POISON fills results and workspaces with NaN before every call, so that memory that a
kernel leaves unwritten is noticed. It must be set before a call is compiled.
"""

from __future__ import annotations

import json
import os
import pathlib

os.environ.setdefault("ATTN_DISPATCH_POISON", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pytest

from attn_dispatch_tools.reports.environment import cuda_devices, environment, file_name

ROWS: dict[str, list[dict]] = {}


def pytest_addoption(parser):
    parser.addoption("--out", default="", help="folder for the report of this run")
    parser.addoption("--out-name", default="gpu_suite", help="the beginning of its name")


def pytest_collection_modifyitems(config, items):
    here = pathlib.Path(__file__).parent
    if cuda_devices() or os.environ.get("ATTN_DISPATCH_SEVERAL_CPUS"):
        return
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def record(request):
    """A function that adds a row of numbers to the report, under the test's name."""

    def keep(**row):
        ROWS.setdefault(request.node.originalname, []).append(row)

    return keep


def pytest_sessionfinish(session, exitstatus):
    folder = session.config.getoption("--out")
    if not folder or not ROWS:
        return
    facts = environment()
    name = file_name(session.config.getoption("--out-name"), facts)
    outcomes = session.config.pluginmanager.get_plugin("terminalreporter").stats
    counts = {name: len(outcomes.get(name, [])) for name in ("passed", "failed", "skipped")}
    report = {"environment": facts, **counts, "rows": ROWS}
    pathlib.Path(folder, f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
