"""What the real cuDNN plans, the newest and the oldest that is supported, for four kinds of GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend import needs_cudnn
from plan_cases import ARCHS, CASES

pytestmark = needs_cudnn

INSTALLED = "installed"
OTHERS = [path for path in os.environ.get("ATTN_DISPATCH_TEST_CUDNN", "").split(os.pathsep) if path]

HEAD_DIM = "cuDNN refuses the graph: Num hidden_dim should be less than or equal to 128"
CRASH = "github.com/NVIDIA/cudnn-frontend/issues/1071"

REFUSED_BACKWARD: dict[str, dict[str, str]] = {
    "bfloat16_d256_full": {"sm80": HEAD_DIM, "sm120": HEAD_DIM},
    "value_narrower": {"sm80": HEAD_DIM, "sm120": HEAD_DIM},
    "everything_one": dict.fromkeys(ARCHS, CRASH),
}
"""Every refusal there is, by what the reason says. No forward pass is refused."""

REFUSED_BACKWARD_BEFORE: dict[tuple[str, str], tuple[int, int]] = {
    ("bfloat16_d256_full", "sm100"): (91300, 92800),
}
"""Refused for their head dim below the first version, planned from the second, untried between."""


def _environment(library: str) -> dict[str, str]:
    if library == INSTALLED:
        return dict(os.environ)
    # Older cuDNNs need NVRTC to plan, and look for it beside themselves or where this says.
    nvrtc = [
        str(Path(str(file.locate())).parent)
        for file in importlib.metadata.files("nvidia-cuda-nvrtc") or []
        if file.name.startswith("libnvrtc.so")
    ]
    search = os.pathsep.join([*nvrtc, os.environ.get("LD_LIBRARY_PATH", "")])
    return os.environ | {"ATTN_DISPATCH_CUDNN": library, "LD_LIBRARY_PATH": search}


@pytest.fixture(scope="module", autouse=True)
def tables() -> Any:
    """library -> what plan_cases.py prints with it. All versions plan at the same time."""
    script = Path(__file__).with_name("plan_cases.py")
    running = {
        library: subprocess.Popen(
            [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=_environment(library),
        )
        for library in (INSTALLED, *OTHERS)
    }  # fmt: skip
    finished: dict[str, dict[str, Any]] = {}

    def table(library: str) -> dict[str, Any]:
        if library not in finished:
            out, errors = running[library].communicate()
            assert running[library].returncode == 0, errors[-3000:]
            finished[library] = json.loads(out)
        return finished[library]

    yield table
    for process in running.values():
        process.kill()
        process.communicate()


Tables = Callable[[str], dict[str, Any]]

LIBRARIES = [INSTALLED, *OTHERS] if OTHERS else [
    INSTALLED,
    pytest.param("", marks=pytest.mark.skip(
        reason="ATTN_DISPATCH_TEST_CUDNN names no further libcudnn.so.9 to plan with"
    )),
]  # fmt: skip


def expected_refusal(case: str, arch: str, direction: str, version: int) -> str | None:
    """What the reason against a cell says; None if the cell is planned; "untried" if unknown."""
    if direction == "forward":
        return None
    if (case, arch) in REFUSED_BACKWARD_BEFORE:
        last, first = REFUSED_BACKWARD_BEFORE[case, arch]
        return HEAD_DIM if version < last else None if version >= first else "untried"
    return REFUSED_BACKWARD.get(case, {}).get(arch)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", CASES)
def test_what_is_planned(tables: Tables, library: str, case: str):
    table = tables(library)
    version, rows = table["version"], table["rows"][case]
    assert set(rows) == set(ARCHS)
    for arch, directions in rows.items():
        assert set(directions) == {"forward", "backward"}
        for direction, got in directions.items():
            expected = expected_refusal(case, arch, direction, version)
            where = (version, arch, direction, got)
            if expected == "untried":
                continue
            if expected is None:
                assert re.match(r"eng\d+_k\d+=", got.get("engine", "")), where
                # A backward pass accumulates query's gradient in float32.
                assert got["workspace_bytes"] >= (1 if direction == "backward" else 0), where
            else:
                (reason,) = got.get("reasons", [""])
                assert expected in reason, where
                text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
                assert reason.endswith(f"(cuDNN {text})"), where


@pytest.mark.parametrize("library", LIBRARIES)
def test_devices_get_engines_of_their_own(tables: Tables, library: str):
    rows = tables(library)["rows"]["bfloat16_d128_causal"]
    families = {arch: rows[arch]["forward"]["engine"].split("_")[0] for arch in ARCHS}
    assert len({families["sm80"], families["sm90"], families["sm100"]}) == 3, families


def test_versions_are_those_asked_for(tables: Tables):
    versions = [tables(library)["version"] for library in (INSTALLED, *OTHERS)]
    assert len(set(versions)) == len(versions) and min(versions) >= 91200
    for path in OTHERS:
        assert tables(path)["path"] == path
