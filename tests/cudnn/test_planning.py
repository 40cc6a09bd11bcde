"""What the real cuDNN plans, the newest and the oldest that is supported, for four kinds of GPU."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.scripts.plan_matrix import INSTALLED, Cell, Matrix, Planning
from tests.scripts.support_table import DOCUMENT, REFUSALS, document, refusals
from tests.support.backend import needs_cudnn
from tests.support.plan_cases import ARCHS, CASES, CELLS, PARTS

pytestmark = needs_cudnn

OTHERS = [path for path in os.environ.get("ATTN_DISPATCH_TEST_CUDNN", "").split(os.pathsep) if path]
LIBRARIES = [INSTALLED, *OTHERS]

EVERY_PLAN = bool(os.environ.get("ATTN_DISPATCH_TEST_EVERY_PLAN"))
"""Else each version plans a twenty-fourth of all cells: another one than the version before."""

Matrices = Callable[[str], Matrix]


@pytest.fixture(scope="module", autouse=True)
def matrices() -> Iterator[Matrices]:
    """A function from a library to its plans of all calls. All versions plan at the same time."""
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
def test_what_is_refused(matrices: Matrices, library: str):
    """Every refusal is one that is written down, for the versions that were asked before."""
    matrix = matrices(library)
    got = refusals(matrix)
    path = REFUSALS / f"cudnn-{matrix.version_text}.json"
    if not path.exists():
        pytest.skip(f"cuDNN {matrix.version_text} has not been written down; it refuses {got}")
    planned = {(label, f"{direction} {arch}") for label, direction, arch in matrix.cells}
    for label in {*(expected := json.loads(path.read_text())), *got}:
        cells = {x: why for x, why in expected.get(label, {}).items() if (label, x) in planned}
        assert got.get(label, {}) == cells, label


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_call_ends_the_process(matrices: Matrices, library: str):
    assert {key: cell.crash for key, cell in matrices(library).cells.items() if cell.crash} == {}


_CRASHES_ONCE = """
import json, os, sys
print(json.dumps([92800, "libcudnn.so.9"]), flush=True)
for i in range(int(sys.argv[1]), {count}):
    if i == 5:
        print("half a li", end="", flush=True)
        os.abort()
    print(json.dumps({{"reasons": [], "engine": f"eng{{i}}", "workspace_bytes": i, "crash": ""}}))
"""


def test_a_crash_is_told_of_its_call_alone(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(_CRASHES_ONCE.format(count=len(CELLS)))
    cells = list(Planning(script=script).matrix().cells.values())
    assert cells[5].crash.startswith("the process ended with -6") and not cells[5].engine
    for i in {*range(len(CELLS))} - {5}:
        assert cells[i] == Cell((), f"eng{i}", i), i


@pytest.mark.parametrize("library", LIBRARIES)
def test_plans_name_an_engine(matrices: Matrices, library: str):
    for key, cell in matrices(library).cells.items():
        assert cell.reasons or cell.crash or cell.engine.startswith("eng"), key


@pytest.mark.parametrize("library", LIBRARIES)
def test_devices_get_engines_of_their_own(matrices: Matrices, library: str):
    cells = matrices(library).cells
    families = {
        arch: cells["causal", "forward", arch].engine.split("_")[0]
        for arch in ("sm80", "sm90", "sm100")
    }
    assert len(set(families.values())) == 3, families


DROPS = "dropout, segment ids"
"""On sm100 cuDNN keeps a bit for every pair of as many longest sequences as there may be."""


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("label", [x for x in CASES if "segment ids" in x or "cu_seqlens" in x])
def test_packed_calls_keep_no_scores(matrices: Matrices, library: str, label: str):
    """Their workspace grows with the length: dq in float32, dk and dv for each query head."""
    case = CASES[label].case
    assert case.t == case.s == 32768
    arrays = 2 * case.b * case.t * (3 * case.n + 2 * case.k) * case.h
    for direction, arch in product(("forward", "backward"), ARCHS):
        cell = matrices(library).cells.get((label, direction, arch))
        if cell and not (label.startswith(DROPS) and arch == "sm100"):
            assert cell.workspace_bytes < 2 * arrays, (direction, arch, cell)


@pytest.mark.parametrize("library", LIBRARIES)
def test_deterministic_is_bounded_or_refused(matrices: Matrices, library: str):
    arrays = 2 * 2 * 8192 * 64 * (3 * 8 + 2 * 2)
    for arch in ARCHS:
        cell = matrices(library).cells.get(("deterministic, 8,192 tokens", "backward", arch))
        if cell is not None and not cell.reasons:
            assert cell.workspace_bytes <= 4 * arrays + 2**24, (arch, cell)


def with_written_down(matrix: Matrix) -> Matrix:
    """The cells that were not planned now, as they were when they were written down."""
    path = REFUSALS / f"cudnn-{matrix.version_text}.json"
    written = json.loads(path.read_text()) if path.exists() else {}
    known = {
        (label, direction, arch): Cell(tuple(written.get(label, {}).get(f"{direction} {arch}", ())))
        for label, direction, arch in CELLS
    }
    return replace(matrix, cells=known | matrix.cells)


def test_versions_are_those_asked_for(matrices: Matrices):
    versions = [matrices(library).version for library in LIBRARIES]
    assert len(set(versions)) == len(versions) and min(versions) >= 91200
    for path in OTHERS:
        assert matrices(path).path == path


def test_support_page_is_up_to_date(matrices: Matrices):
    said = DOCUMENT.read_text()
    matrix = with_written_down(matrices(INSTALLED))
    (version,) = re.findall(r"the real cuDNN\s(\S+) plan every call", said)
    if version == matrix.version_text:
        assert said == document(matrix)
    for label in CASES:
        assert f"| {label} |" in said
