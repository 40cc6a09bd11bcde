"""Serialized programs with changed custom calls: refused while they compile, and by name."""

from __future__ import annotations

from backend import needs_cudnn, needs_no_driver
from fuzz.child import DRAWS, outcomes

# With a driver the library goes on to plan for the device that is there.
pytestmark = [needs_cudnn, needs_no_driver]


def test_changed_modules():
    found = outcomes(
        "fuzz.modules", range(DRAWS or 120), seconds=60.0, environment={"JAX_PLATFORMS": "cpu"}
    )
    assert found["taken"] > 10
    assert len([x for x in found if x.startswith("refused: ")]) > 12, found
    print(dict(found.most_common()))
