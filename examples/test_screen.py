"""The console of the examples when its reader has left."""

import io

import pytest

pytest.importorskip("rich")

from .screen import Console


def test_a_reader_that_has_had_enough_ends_the_example():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Console(file=Closed()).print("a line")
