"""The script for owners of AMD GPUs (tests/gpu/amd_defects.py), on the emulator and on the CPU."""

from __future__ import annotations

import itertools
import json

import jax.numpy as jnp
import pytest

from attn_dispatch.aiter import folder, kernels
from attn_dispatch.aiter.release import DEV18, Release
from tests.gpu import amd_defects
from tests.support.aiter_dispatch import grid

NEWEST = Release("v0.1.15", (0, 1, 20))


def test_calls_run_on_the_kernels_in_question(emulator, monkeypatch):
    monkeypatch.setattr(folder, "release", lambda arch: NEWEST)
    emulator.set_generation(NEWEST.generation)
    call = next(x for x in amd_defects.SMALL if "gfx942" in x.archs)
    found = amd_defects.measure(call, "aiter", seconds=60, most=2)
    assert found["runs"] == 2 and emulator.calls("backward") == 3
    assert "asm v3 bf16" in found["explain"]
    assert set(found["wrong"].values()) | set(found["changed"].values()) == {0}
    assert max(found["largest_error"].values()) < 2**-6


def test_kernels_in_question_are_those_that_calls_otherwise_avoid():
    wide = kernels.replace(grid.CALL, head_dim=192)
    back = kernels.replace(grid.CALL, backward=True)
    assert kernels.kernel_for(wide, "gfx950", DEV18).family == "ck"
    assert not kernels.kernel_for(back, "gfx942", NEWEST).rounds_dq
    with amd_defects.kernels_in_question():
        assert kernels.kernel_for(wide, "gfx950", DEV18).family == "asm"
        assert kernels.kernel_for(wide, "gfx950", NEWEST).doubts == ()
        assert kernels.kernel_for(back, "gfx942", NEWEST).rounds_dq
    assert kernels.kernel_for(wide, "gfx950", NEWEST).doubts


class _Compiled:
    """A program whose gradient of key is wrong in every third run, and NaN in every fifth."""

    def __init__(self, right):
        self.right, self.runs = right, itertools.count()

    def lower(self, *arrays):
        return self

    def compile(self):
        return self

    def __call__(self, *arrays):
        out, lse, dq, dk, dv = self.right(*arrays)
        run = next(self.runs)
        factor = jnp.nan if run % 5 == 4 else 1.5 if run % 3 == 2 else 1
        return out, lse, dq, dk * factor, dv


def test_wrong_runs_are_counted(monkeypatch):
    right = amd_defects.program
    monkeypatch.setattr(
        amd_defects, "program",
        lambda call, name: right(call, name) if name else _Compiled(right(call, "xla")),
    )  # fmt: skip
    found = amd_defects.measure(amd_defects.SMALL[0], None, seconds=60, most=9)
    assert found["wrong"] == {"out": 0, "lse": 0, "dq": 0, "dk": 5, "dv": 0}
    assert found["changed"]["dk"] == 5
    assert found["largest_error"]["dk"] == "not finite"


@pytest.mark.parametrize("busy", [False, True])
def test_the_script_writes_a_report_without_a_gpu(busy, tmp_path, monkeypatch):
    monkeypatch.setattr(amd_defects, "SMALL", amd_defects.SMALL[-1:])
    path = tmp_path / "defects.json"
    flag = "--neighbour" if busy else "--no-neighbour"
    amd_defects.main(["--out", str(path), "--runs", "1", flag])
    report = json.loads(path.read_text("utf-8"))
    assert [x["busy"] for x in report["calls"]] == ([False, True] if busy else [False])
    assert all(max(x["wrong"].values()) == 0 for x in report["calls"])
    assert report["aiter"] and report["device"]
