"""Plans by the real cuDNN, the newest and the oldest supported, for four architectures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.scripts.plan_matrix import INSTALLED, Cell, Matrix, Planning
from tests.scripts.support_table import DOCUMENT, REFUSALS, refusals, table
from tests.support.backend import needs_cudnn
from tests.support.extent import EVERY_PLAN
from tests.support.page_tables import with_table
from tests.support.plan_cases import ARCHS, CASES, CELLS, PARTS

pytestmark = needs_cudnn

OTHERS = [path for path in os.environ.get("ATTN_DISPATCH_TEST_CUDNN", "").split(os.pathsep) if path]
LIBRARIES = [INSTALLED, *OTHERS]

Matrices = Callable[[str], Matrix]


@pytest.fixture(scope="module", autouse=True)
def matrices() -> Iterator[Matrices]:
    """A function from a library to its plans. All versions plan at the same time."""
    running = {
        library: Planning(library, part=None if EVERY_PLAN else i % PARTS)
        for i, library in enumerate(LIBRARIES)
    }
    finished: dict[str, Matrix] = {}

    def matrix(library: str) -> Matrix:
        if library not in finished:
            finished[library] = running[library].matrix()
        return finished[library]

    yield matrix
    for planning in running.values():
        planning.stop()


@pytest.mark.parametrize("library", LIBRARIES)
def test_refusals_are_the_recorded_ones(matrices: Matrices, library: str):
    """For every recorded version, the reasons are those in its file."""
    matrix = matrices(library)
    got = refusals(matrix)
    path = REFUSALS / f"cudnn-{matrix.version_text}.json"
    if not path.exists():
        pytest.skip(f"cuDNN {matrix.version_text} has no record; it refuses {got}")
    planned = {(label, f"{direction} {arch}") for label, direction, arch in matrix.cells}
    for label in {*(expected := json.loads(path.read_text())), *got}:
        cells = {x: y for x, y in expected.get(label, {}).items() if (label, x) in planned}
        assert got.get(label, {}) == cells, label


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_call_crashes_the_planning_process(matrices: Matrices, library: str):
    assert {key: cell.crash for key, cell in matrices(library).cells.items() if cell.crash} == {}


_CRASHES_ONCE = """
import json, os, sys
print(json.dumps([92800, "libcudnn.so.9"]), flush=True)
for i in range(int(sys.argv[1]), {count}):
    if i == 5:
        print("half a li", end="", flush=True)
        os.abort()
    print(json.dumps({{"engine": f"eng{{i}}", "workspace_bytes": i}}))
"""


def test_crash_is_reported_for_its_call_only(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(_CRASHES_ONCE.format(count=len(CELLS)))
    cells = list(Planning(script=script).matrix().cells.values())
    assert cells[5].crash.startswith("the process ended with -6") and not cells[5].engine
    for i in {*range(len(CELLS))} - {5}:
        assert cells[i] == Cell({}, f"eng{i}", i), i


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_plan_names_an_engine(matrices: Matrices, library: str):
    for key, cell in matrices(library).cells.items():
        assert cell.sentences or cell.crash or cell.engine.startswith("eng"), key


@pytest.mark.parametrize("library", LIBRARIES)
def test_architectures_get_different_engines(matrices: Matrices, library: str):
    cells = matrices(library).cells
    families = {
        arch: cells["causal", "forward", arch].engine.split("_")[0]
        for arch in ("sm80", "sm90", "sm100")
    }
    assert len(set(families.values())) == 3, families


DROPOUT = "dropout, segment ids"
"""On sm100 cuDNN stores one bit per pair for max_segments sequences of the longest length."""


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("label", [x for x in CASES if "segment ids" in x or "cu_seqlens" in x])
def test_workspace_of_packed_calls_is_linear(matrices: Matrices, library: str, label: str):
    """The workspace holds dq in float32, and dk and dv for each query head."""
    case = CASES[label].case
    assert case.t == case.s == 32768
    arrays = 2 * case.b * case.t * (3 * case.n + 2 * case.k) * case.h
    for direction, arch in product(("forward", "backward"), ARCHS):
        cell = matrices(library).cells.get((label, direction, arch))
        if cell and not (label.startswith(DROPOUT) and arch == "sm100"):
            assert cell.workspace_bytes < 2 * arrays, (direction, arch, cell)


@pytest.mark.parametrize("library", LIBRARIES)
def test_deterministic_workspace_is_bounded_or_refused(matrices: Matrices, library: str):
    arrays = 2 * 2 * 8192 * 64 * (3 * 8 + 2 * 2)
    for arch in ARCHS:
        cell = matrices(library).cells.get(("deterministic, 8,192 tokens", "backward", arch))
        if cell is not None and not cell.sentences:
            assert cell.workspace_bytes <= 4 * arrays + 2**24, (arch, cell)


def with_recorded_cells(matrix: Matrix) -> Matrix:
    """The matrix with recorded cells in place of those that were not planned now."""
    path = REFUSALS / f"cudnn-{matrix.version_text}.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    known = {
        (label, direction, arch): Cell(records.get(label, {}).get(f"{direction} {arch}", {}))
        for label, direction, arch in CELLS
    }
    return replace(matrix, cells=known | matrix.cells)


def test_versions_are_the_requested_ones(matrices: Matrices):
    versions = [matrices(library).version for library in LIBRARIES]
    assert len(set(versions)) == len(versions) and min(versions) >= 91200
    for path in OTHERS:
        assert matrices(path).path == path


def test_the_table_of_features_is_up_to_date(matrices: Matrices):
    matrix = with_recorded_cells(matrices(INSTALLED))
    page = DOCUMENT.read_text()
    if f"cuDNN {matrix.version_text} plan" in page:
        assert page == with_table(DOCUMENT, "support_table", table(matrix))
    assert all(f"| {label} |" in page for label in CASES)
