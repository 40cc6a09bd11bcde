"""Attributes that contradict themselves or each other are refused, each with a sentence."""

from __future__ import annotations

from tests.fuzz import hostile_specs
from tests.fuzz.child import outcomes
from tests.support.backend import needs_cudnn

pytestmark = needs_cudnn


def test_each_is_refused_by_name():
    found = outcomes("tests.fuzz.hostile_specs", range(len(hostile_specs.HOSTILE)))
    assert found == {"wrong call": len(hostile_specs.HOSTILE)} and len(hostile_specs.HOSTILE) >= 66


def test_what_they_are_made_from_is_right():
    """Else they would be refused for something else."""
    native = hostile_specs.native_libraries.load(hostile_specs.native_libraries.CUDA)
    for name in ("FORWARD", "BACKWARD", "LENGTHS", "PACKED", "PACKED_BACKWARD", "PAGED", "BIASED"):
        assert native.buffers(getattr(hostile_specs, name)), name
    assert native.buffers(hostile_specs.MODDED) and native.buffers(hostile_specs.MODDED_BACKWARD)
