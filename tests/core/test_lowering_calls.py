"""A plain causal call enters few of the package's files and functions."""

from __future__ import annotations

import pytest

from tests.scripts.lowering_calls import FUNCTIONS, Entered, entered_anew
from tests.support.backend import needs_cudnn

BOUNDS = {"forward": (73, 425, 1_110), "training": (75, 472, 2_340)}
"""Upper bounds: files, functions, calls. The goal of the forward pass is (30, 150, 600)."""


@pytest.fixture(scope="module", params=FUNCTIONS)
def causal_call(request: pytest.FixtureRequest) -> tuple[str, Entered]:
    """What a call enters of which no fact is known."""
    return request.param, entered_anew(FUNCTIONS[request.param])


@needs_cudnn
def test_plain_call_enters_few_files_and_functions(causal_call: tuple[str, Entered]):
    name, found = causal_call
    count = len(found.files), len(found.calls), found.calls.total()
    is_within = all(x <= most for x, most in zip(count, BOUNDS[name], strict=True))
    print(found.by_file())
    assert is_within, f"{name}: {found}, expected at most {BOUNDS[name]}"


@needs_cudnn
def test_plain_call_consults_no_cache_and_one_rewrite(causal_call: tuple[str, Entered]):
    _, found = causal_call
    rewrites = {file for file in found.files if file.startswith("core/rewrites/")}
    # Only the rewrite of bottom-right windows is consulted, by the backward pass.
    known = ("chain", "search", "rewrite", "one_diagonal", "catalogue", "in_parts")
    assert rewrites <= {f"core/rewrites/{x}.py" for x in known}
    assert not any("context/" in file or file.startswith("aiter") for file in found.files)
