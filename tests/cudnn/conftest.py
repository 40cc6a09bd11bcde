"""Planning processes, which end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_dispatch.cudnn.planning_process import PlanningProcess
from tests.support.planning import faulty_process, started_process


@pytest.fixture
def process() -> Iterator[PlanningProcess]:
    yield from started_process()


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[PlanningProcess]:
    """A planning process that crashes on a batch of 13 and hangs on a batch of 14."""
    yield from faulty_process(tmp_path)
