"""Compiled kernels for calls on this CPU."""

from __future__ import annotations

import pytest

from attn_dispatch.fa4 import compiled
from tests.support.fa4_emulated import emulated


@pytest.fixture
def kernels_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make calls find the stand-ins, and fill results and scratch with NaN before each."""
    library = emulated().library
    monkeypatch.setattr(compiled, "find", lambda: library)
    monkeypatch.setenv("ATTN_DISPATCH_POISON", "1")
