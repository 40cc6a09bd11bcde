"""Each wrong or unsupported call says what tests/results/sentences.md says."""

from __future__ import annotations

import pytest

from tests.sentences import call, packed
from tests.sentences.table import DOCUMENT, ROOMS, section
from tests.support.repository import ROOT


def test_rows_change_a_valid_call():
    assert call.attention().shape == (2, 3, 4, 8)
    assert packed.ragged().shape == (12, 4, 6)
    assert packed.paged().shape == (3, 1, 4, 16)


@pytest.mark.parametrize("room", ROOMS)
def test_each_row_says_what_the_file_says(room: str):
    """If the difference is meant, `make sentences` writes the file anew."""
    _, *sections = (ROOT / DOCUMENT).read_text().split("\n## ")
    expected = sections[ROOMS.index(room)]
    assert section(room).splitlines() == f"## {expected}".splitlines()
