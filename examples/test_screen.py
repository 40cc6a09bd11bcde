"""What the examples print, where nobody reads it any more."""

import io

import pytest

pytest.importorskip("rich")

from .screen import console


def test_a_reader_that_has_had_enough_ends_the_example(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(console, "file", Closed())
    with pytest.raises(BrokenPipeError):
        console.print("a line")
