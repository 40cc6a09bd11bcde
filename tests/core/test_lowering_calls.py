"""Lowering a plain causal call enters few of the package's files and functions."""

from __future__ import annotations

import pytest

from tests.scripts.lowering_calls import FUNCTIONS, Entered, entered
from tests.support.backend import needs_cudnn

BOUNDS = {"forward": (38, 860), "training": (41, 2300)}
"""Upper bounds: (files entered, functions called). Predicting the times of both passes for two
implementations takes some 130 calls forward, and 600 in training. Without cached facts:
(44, 1,988) forward, (46, 4,426) in training."""


@pytest.fixture(scope="module", params=FUNCTIONS)
def second_lowering(request: pytest.FixtureRequest) -> tuple[str, Entered]:
    """What is entered while a process lowers its second call."""
    function = FUNCTIONS[request.param]
    entered(function, length=512)
    return request.param, entered(function)


@needs_cudnn
def test_plain_call_enters_few_files_and_functions(second_lowering: tuple[str, Entered]):
    name, found = second_lowering
    most_files, most_calls = BOUNDS[name]
    assert len(found.files) <= most_files, found.by_file()
    assert found.calls.total() <= most_calls, found.by_file()


@needs_cudnn
def test_plain_call_consults_no_cache_and_one_rewrite(second_lowering: tuple[str, Entered]):
    _, found = second_lowering
    rewrites = {file for file in found.files if file.startswith("core/rewrites/")}
    # Only the rewrite of bottom-right windows is consulted, by the backward pass.
    assert rewrites <= {
        f"core/rewrites/{x}.py" for x in ("chain", "search", "rewrite", "one_diagonal")
    }
    assert not any("planner" in file or file.startswith("aiter") for file in found.files)
