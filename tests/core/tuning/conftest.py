"""The stand-in implementation for tests of tuning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.tuning_toy import Toy, installed_toy


@pytest.fixture
def toy(monkeypatch, tmp_path) -> Iterator[Toy]:
    """A stand-in beside XLA on the CPU, a clock that reads TIMES, and a file for winners."""
    yield from installed_toy(monkeypatch, tmp_path)
