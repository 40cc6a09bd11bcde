"""What the real cuDNN plans, the newest and the oldest that is supported, for four kinds of GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest

from attn_dispatch import cudnn_library
from backend import needs_cudnn
from plan_cases import ARCHS, CASES, CELLS
from plan_matrix import INSTALLED, Matrix, Planning
from support_table import DOCUMENT, REFUSALS, document, refusals

pytestmark = needs_cudnn

OTHERS = [path for path in os.environ.get("ATTN_DISPATCH_TEST_CUDNN", "").split(os.pathsep) if path]
LIBRARIES = [INSTALLED, *OTHERS]

LONG = 32768
ARRAY_BYTES = 2 * LONG * 64 * (3 * 2 + 2 * 1)
"""query, out, out_grad and key, value of a call with 2 query heads, 1 kv head and head dim 64."""

Matrices = Callable[[str], Matrix]


@pytest.fixture(scope="module", autouse=True)
def matrices() -> Iterator[Matrices]:
    """library -> what it makes of everything. All versions plan at the same time."""
    running = {library: Planning(library) for library in LIBRARIES}
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
    assert set(matrix.cells) == set(CELLS)
    got = refusals(matrix)
    path = REFUSALS / f"cudnn-{matrix.version_text}.json"
    if not path.exists():
        pytest.skip(f"cuDNN {matrix.version_text} has not been written down; it refuses {got}")
    expected = json.loads(path.read_text())
    assert got.keys() == expected.keys()
    for label, cells in expected.items():
        assert got[label] == cells, label


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_call_ends_the_process(matrices: Matrices, library: str):
    assert {key: cell.crash for key, cell in matrices(library).cells.items() if cell.crash} == {}


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


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_packed_calls_keep_no_scores(matrices: Matrices, direction: str, arch: str):
    """Their workspace grows with the length: dq in float32, dk and dv for each query head."""
    cell = matrices(INSTALLED).cells["segment ids", direction, arch]
    assert 0 <= cell.workspace_bytes < 4 * ARRAY_BYTES, cell


@pytest.mark.parametrize("library", LIBRARIES)
def test_deterministic_is_bounded_or_refused(matrices: Matrices, library: str):
    arrays = 2 * 2 * 8192 * 64 * (3 * 8 + 2 * 2)
    for arch in ARCHS:
        cell = matrices(library).cells["deterministic, 8,192 tokens", "backward", arch]
        assert cell.reasons or cell.workspace_bytes <= 4 * arrays + 2**24, (arch, cell)


def test_versions_are_those_asked_for(matrices: Matrices):
    versions = [matrices(library).version for library in LIBRARIES]
    assert len(set(versions)) == len(versions) and min(versions) >= 91200
    for path in OTHERS:
        assert matrices(path).path == path


def test_support_page_is_up_to_date(matrices: Matrices):
    said = DOCUMENT.read_text()
    if f"the real cuDNN {cudnn_library.find().version_text} plan\n" in said:
        assert said == document(matrices(INSTALLED))
    for label in CASES:
        assert f"| {label} |" in said
