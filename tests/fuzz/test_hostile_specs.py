"""Attributes that are wrong or contradict each other are refused with a sentence."""

from __future__ import annotations

from tests.fuzz import hostile_specs
from tests.fuzz.child import outcomes
from tests.support.backend import needs_cudnn

pytestmark = needs_cudnn


def test_each_set_is_refused_by_the_name_of_the_wrong_attribute():
    found = outcomes("tests.fuzz.hostile_specs", range(len(hostile_specs.HOSTILE)))
    assert found == {"wrong call": len(hostile_specs.HOSTILE)} and len(hostile_specs.HOSTILE) >= 66


def test_the_sets_before_their_change_are_accepted():
    """A change to a wrong set would prove nothing."""
    native = hostile_specs.native_libraries.load(hostile_specs.native_libraries.CUDA)
    for name in ("FORWARD", "BACKWARD", "LENGTHS", "PACKED", "PACKED_BACKWARD", "PAGED", "BIASED"):
        assert native.buffers(getattr(hostile_specs, name)), name
    assert native.buffers(hostile_specs.MODDED) and native.buffers(hostile_specs.MODDED_BACKWARD)
