"""Attributes that are wrong or contradict each other are refused with a sentence."""

from __future__ import annotations

from tests.fuzz import hostile_attributes as hostile
from tests.fuzz.child import outcomes
from tests.support.backend import needs_cudnn

pytestmark = needs_cudnn


def test_each_set_is_refused_by_the_name_of_the_wrong_attribute():
    found = outcomes("tests.fuzz.hostile_attributes", range(len(hostile.HOSTILE)))
    assert found == {"wrong call": len(hostile.HOSTILE)} and len(hostile.HOSTILE) >= 66


def test_the_sets_before_their_change_are_accepted():
    """A change to a wrong set would prove nothing."""
    native = hostile.native_libraries.load(hostile.native_libraries.CUDA)
    for name in ("FORWARD", "BACKWARD", "LENGTHS", "PACKED", "PACKED_BACKWARD", "PAGED", "BIASED"):
        assert native.buffers(getattr(hostile, name)), name
    assert native.buffers(hostile.MODDED) and native.buffers(hostile.MODDED_BACKWARD)
