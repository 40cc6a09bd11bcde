"""Sharded calls on eight CPU devices: correct results, no more collectives than jax.nn."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

from tests.scripts import mesh_table
from tests.support.mesh_programs import LAYOUTS, PROGRAMS, cells
from tests.support.module_report import report_of
from tests.support.repository import ROOT

TOLERANCE = 1e-4  # shards can sum in another order


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of("tests.scripts.mesh_table", "--print")


MANUAL = [f"shard_map over all axes|N 8, K 4|{kind}" for kind in ("Auto", "Explicit")] + [
    f"shard_map over x alone|{name}|{kind}"
    for name in ("N 8, K 4", "N 8, K 2")
    for kind in ("Auto", "Explicit")
]
LABELS = ["|".join(cell) for cell in cells()] + MANUAL


def test_report_has_every_cell(report):
    assert sorted(report["cells"]) == sorted(LABELS)


@pytest.mark.parametrize("label", LABELS)
def test_sharded_values_and_gradients_are_correct(report, label):
    assert report["cells"][label]["ours"]["error"] <= TOLERANCE


@pytest.mark.parametrize("label", LABELS)
def test_work_is_shared_with_no_more_collectives_than_jax_nn(report, label):
    ours, theirs = (report["cells"][label][x] for x in ("ours", "jax.nn"))
    layout = label.split("|")[0]
    if layout == "sequence":
        # Arrays arrive split along the length and are exchanged into parts by heads, so no device
        # holds a whole array.
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
def test_training_losses_equal_those_of_one_device(report, kv_heads):
    losses = {x: y for x, y in report["losses"].items() if x.endswith(f"|{kv_heads}")}
    expected = losses.pop(f"one device|{kv_heads}")
    assert len(losses) == 8 and expected[2] < expected[0]
    for found in losses.values():
        assert found == pytest.approx(expected, abs=2e-6)


@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="collectives depend on the JAX version")
def test_meshes_page_shows_this_report(report):
    assert mesh_table.DOCUMENT.read_text() == mesh_table.document(report)


def test_meshes_page_has_every_layout_and_program():
    page = mesh_table.DOCUMENT.read_text()
    assert all(f"| {name} |" in page for name in (*LAYOUTS, *PROGRAMS))


@pytest.fixture(scope="module")
def calls_report() -> dict[str, Any]:
    return report_of("tests.core.mesh_calls")


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_sharded_vmap_and_several_batch_dims(calls_report, kind):
    found = {x: y for x, y in calls_report["dims"].items() if x.startswith(kind)}
    assert len(found) == 6 and max(found.values()) <= TOLERANCE


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_sharded_vmap_with_shared_operands(calls_report, kind):
    found = {x: y for x, y in calls_report["mapped"].items() if x.startswith(kind)}
    assert len(found) == 3 and max(found.values()) <= TOLERANCE


@pytest.mark.parametrize("kind", ["Explicit", "mixed", "Auto"])
def test_other_derivatives_of_sharded_calls(calls_report, kind):
    found = {x: y for x, y in calls_report["derivatives"].items() if x.startswith(kind)}
    assert len(found) == 6 and max(found.values()) <= TOLERANCE


def test_part_of_a_mesh_axis_splits_a_call_without_collectives(calls_report):
    for found in calls_report["cut"].values():
        assert found["error"] <= TOLERANCE and not found["collectives"]


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_export_of_sharded_calls_is_correct_and_warns_for_auto_axes(calls_report, kind):
    found = calls_report["export"][kind]
    assert found["error"] <= TOLERANCE
    assert found["warned"] == (["AttentionShardingWarning"] if kind == "Auto" else [])


def test_call_that_cannot_be_split_warns_once(calls_report):
    for kind in ("Explicit", "Auto"):
        (message,) = calls_report["unsplit"][kind]
        assert "'x' (8 devices)" in message and "4 heads" in message and "batch of 2" in message
        # Of 8,192 bytes of query, key and value each, a device has an eighth.
        assert "gathers 21.5 kB of query, key and value" in message


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize(
    ("name", "what", "remedy"),
    [
        # Of 8,192 bytes of each array, in two batch rows, a device has a quarter.
        ("keys", "key and value are sharded along their length by 'y' (4 devices), and each "
         "device gathers 12.3 kB of them", "along kv heads, or let each device attend to its own"),
        # The axis splits 8 query heads; of the 2 kv heads every device needs one.
        ("few kv heads", "key and value are sharded along their length by 'y' (4 devices), and "
         "each device gathers 6.14 kB of them", "remedy: along an axis of at most 2 devices"),
        ("pages", "key_pages and value_pages are sharded along the number of pages by 'y' "
         "(4 devices), and each device gathers 6.14 kB of them", "its own pool in a shard_map"),
    ],
)  # fmt: skip
def test_gathered_keys_warn_once_with_their_bytes(
    calls_report, kind: str, name: str, what: str, remedy: str
):
    """Once for a call and its gradients, at the line that makes it."""
    (message,) = calls_report["gathers"][f"{kind} {name}"]
    assert what in message and remedy in message
    assert message.startswith(str(ROOT / "tests/core/mesh_calls.py"))


def test_keys_that_are_only_exchanged_do_not_warn(calls_report):
    quiet = ("heads", "exchanged", "heads of pages")
    found = [calls_report["gathers"][f"{x} {y}"] for x in ("Explicit", "Auto") for y in quiet]
    assert found == [[]] * 6


@pytest.mark.parametrize("kind", ("Explicit", "Auto"))
def test_settings_hold_when_shards_are_lowered(calls_report, kind):
    """With Auto axes, XLA lowers the shards while it compiles, possibly in another thread."""
    assert calls_report["settings"][kind] == [True] * 3


def test_nested_shard_maps_give_correct_results(calls_report):
    assert calls_report["nested"] <= TOLERANCE


def test_calls_on_one_device_under_a_mesh_give_correct_results(calls_report):
    assert calls_report["unsharded"] <= TOLERANCE


def test_each_device_seeds_its_kernel_differently(calls_report):
    """Eight devices get eight different dropout keys."""
    assert calls_report["seeds"] == 8


def test_compilation_cache_distinguishes_and_finds_calls(tmp_path):
    """Calls with different options are different entries; another process finds both again."""
    first, again = (report_of("tests.core.mesh_calls", "--cache", str(tmp_path)) for _ in range(2))
    assert first["sums"] == again["sums"]
    assert first["sums"]["Auto"] == first["sums"]["Explicit"]
    assert len(set(first["sums"]["Auto"])) == 2
    for kind in ("Explicit", "Auto"):
        assert first["hits"][kind] == [False, False] and again["hits"][kind] == [True, True]
    # What the partitioner's messages repeat of a call along Auto axes.
    assert first["names"] == again["names"] and len(set(first["names"])) == 2
    assert all(re.fullmatch(r"forward [0-9a-f]{16}", x) for x in first["names"])
