"""The handlers of compiled FlashAttention-4 over the fake driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fa4_emulated import Emulated, emulated


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """They start with an empty log, and no failure outlives the test."""
    monkeypatch.delenv("ATTN_DISPATCH_POISON", raising=False)  # the GPU suite's conftest sets it
    found = emulated()
    found.driver.lines()
    yield found
    found.driver.fail("")
