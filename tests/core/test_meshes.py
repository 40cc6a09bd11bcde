"""Sharded calls on eight CPU devices: right numbers, jax.nn's collectives or fewer, their page."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jax
import pytest

from tests.scripts import mesh_table
from tests.support.mesh_programs import LAYOUTS, PROGRAMS, cells
from tests.support.repository import ROOT, environment

TOLERANCE = 1e-4  # a shard's sums may be taken in another order


def run(module: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    env = environment(**variables)
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads(run("tests.scripts.mesh_table", "--print").splitlines()[-1])


MANUAL = [f"shard_map over all axes|N 8, K 4|{kind}" for kind in ("Auto", "Explicit")] + [
    f"shard_map over x alone|{name}|{kind}"
    for name in ("N 8, K 4", "N 8, K 2")
    for kind in ("Auto", "Explicit")
]
LABELS = ["|".join(cell) for cell in cells()] + MANUAL


def test_the_report_has_every_cell(report):
    assert sorted(report["cells"]) == sorted(LABELS)


@pytest.mark.parametrize("label", LABELS)
def test_values_and_gradients(report, label):
    assert report["cells"][label]["ours"]["error"] <= TOLERANCE


@pytest.mark.parametrize("label", LABELS)
def test_nothing_is_gathered_and_the_work_is_shared_out(report, label):
    ours, theirs = (report["cells"][label][x] for x in ("ours", "jax.nn"))
    layout = label.split("|")[0]
    if layout == "sequence":
        # Heads are split in its place: blocks of heads and rows change places, nothing is whole.
        assert ours["share"] <= 0.14
        return
    if "fails" not in theirs:
        assert ours["share"] <= 1.05 * theirs["share"]
        for name, count in ours["collectives"].items():
            assert count <= theirs["collectives"].get(name, 0), name
    else:
        gathers = {x: n for x, n in ours["collectives"].items() if x != "all-reduce"}
        assert ours["share"] <= 0.14 and (not gathers or "x alone" in label)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_training_is_that_of_one_device(report, kv_heads):
    losses = {x: y for x, y in report["losses"].items() if x.endswith(f"|{kv_heads}")}
    expected = losses.pop(f"one device|{kv_heads}")
    assert len(losses) == 8 and expected[2] < expected[0]
    for found in losses.values():
        assert found == pytest.approx(expected, abs=2e-6)


@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="another JAX, other collectives")
def test_the_page_is_what_was_found(report):
    assert mesh_table.DOCUMENT.read_text() == mesh_table.document(report)


def test_every_layout_and_program_is_on_the_page():
    page = mesh_table.DOCUMENT.read_text()
    assert all(f"| {name} |" in page for name in (*LAYOUTS, *PROGRAMS))


@pytest.fixture(scope="module")
def further() -> dict[str, Any]:
    return json.loads(run("tests.core.mesh_calls").splitlines()[-1])


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_vmap_and_several_batch_dims(further, kind):
    found = {x: y for x, y in further["dims"].items() if x.startswith(kind)}
    assert len(found) == 6 and max(found.values()) <= TOLERANCE


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_mapped_calls_that_share_operands(further, kind):
    found = {x: y for x, y in further["mapped"].items() if x.startswith(kind)}
    assert len(found) == 3 and max(found.values()) <= TOLERANCE


@pytest.mark.parametrize("kind", ["Explicit", "mixed", "Auto"])
def test_derivatives_beside_a_reverse_pass(further, kind):
    found = {x: y for x, y in further["derivatives"].items() if x.startswith(kind)}
    assert len(found) == 6 and max(found.values()) <= TOLERANCE


def test_parts_of_mesh_axes_split_calls(further):
    for found in further["cut"].values():
        assert found["error"] <= TOLERANCE and not found["collectives"]


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_export(further, kind):
    found = further["export"][kind]
    assert found["error"] <= TOLERANCE
    assert found["warned"] == (["AttentionShardingWarning"] if kind == "Auto" else [])


def test_what_cannot_be_split_is_said_once(further):
    for kind in ("Explicit", "Auto"):
        (message,) = further["unsplit"][kind]
        assert "'x' (8 devices)" in message and "4 heads" in message and "batch of 2" in message


@pytest.mark.parametrize("kind", ("Explicit", "Auto"))
def test_settings_hold_when_shards_are_lowered(further, kind):
    """XLA has those of Auto axes lowered when it compiles, maybe in another thread."""
    assert further["settings"][kind] == [True] * 3


def test_nested_shard_maps(further):
    assert further["nested"] <= TOLERANCE


def test_calls_on_one_device_under_a_mesh(further):
    assert further["set_around"] <= TOLERANCE


def test_kernels_draw_from_a_key_of_each_devices_own(further):
    """All of them differ, and the key of one device is the caller's."""
    assert further["seeds"] == 8


def test_the_compilation_cache_tells_calls_apart(tmp_path):
    """And finds them again in another process, along Explicit axes without further ado."""
    first, again = (
        json.loads(run("tests.core.mesh_calls", "--cache", str(tmp_path)).splitlines()[-1])
        for _ in range(2)
    )
    assert first["sums"] == again["sums"]
    assert first["sums"]["Auto"] == first["sums"]["Explicit"]
    assert len(set(first["sums"]["Auto"])) == 2
    for kind in ("Explicit", "Auto"):
        assert first["hits"][kind] == [False, False] and again["hits"][kind] == [True, True]
