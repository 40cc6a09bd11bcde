"""JAX's tests of dot_product_attention pass with our call in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("absl", reason="JAX's tests need absl-py")
from tests.scripts import run_jax_tests

# A checkout of the installed version of JAX, which `make test` clones.
SOURCE = Path(os.environ.get("ATTN_DISPATCH_JAX_SOURCE", "none"))


@pytest.mark.skipif(
    not (SOURCE / run_jax_tests.TESTS).is_file(),
    reason="ATTN_DISPATCH_JAX_SOURCE is no checkout of JAX with its tests",
)
@pytest.mark.parametrize("mode", run_jax_tests.MODES)
def test_jax_tests_pass_with_our_call(mode: str):
    outcome = run_jax_tests.run(SOURCE, mode)
    assert not outcome.failed, outcome.text
    # JAX 0.10.2 has 26 tests that need no GPU.
    assert outcome.passed >= 26, outcome.text
