"""A plain causal call enters little of the package while it is lowered."""

from __future__ import annotations

import pytest

from tests.scripts.lowering_calls import FUNCTIONS, Entered, entered
from tests.support.backend import needs_cudnn

BOUNDS = {"forward": (28, 690), "training": (33, 1400)}
"""Files, and calls of functions. Without the facts that are kept they were 44 and 1,988, 46 and
4,426."""


@pytest.fixture(scope="module", params=FUNCTIONS)
def later(request: pytest.FixtureRequest) -> tuple[str, Entered]:
    """A call of a process that has lowered another one."""
    function = FUNCTIONS[request.param]
    entered(function, length=512)
    return request.param, entered(function)


@needs_cudnn
def test_a_plain_call_enters_few_functions(later: tuple[str, Entered]):
    name, found = later
    most_files, most_calls = BOUNDS[name]
    assert len(found.files) <= most_files, found.by_file()
    assert found.calls.total() <= most_calls, found.by_file()


@needs_cudnn
def test_a_plain_call_is_asked_about_no_cache_and_no_other_rewrite(later: tuple[str, Entered]):
    _, found = later
    rewrites = {file for file in found.files if file.startswith("core/rewrites/")}
    # The backward pass is asked about windows from the bottom right.
    assert rewrites <= {
        f"core/rewrites/{x}.py" for x in ("chain", "search", "rewrite", "one_diagonal")
    }
    assert not any("planner" in file or file.startswith("aiter") for file in found.files)
