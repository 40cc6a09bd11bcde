"""Serialized programs with changed custom calls: refused by name, or run."""

from __future__ import annotations

from tests.fuzz.child import DRAWS, outcomes
from tests.support import aiter_emulated
from tests.support.backend import needs_cudnn, needs_no_driver

_ON_CPU = {"JAX_PLATFORMS": "cpu"}


@needs_cudnn
@needs_no_driver  # with one the library goes on to plan for the device that is there
def test_changed_modules():
    """Looked at while they compile; there is no device to run them."""
    found = outcomes("tests.fuzz.modules", range(DRAWS or 120), seconds=60.0, environment=_ON_CPU)
    assert found["taken"] > 10
    assert len([x for x in found if x.startswith("refused: ")]) > 12, found
    print(dict(found.most_common()))


def test_changed_modules_of_aiter():
    """Run on the emulator."""
    aiter_emulated.library()  # to compile it takes longer than a child may
    found = outcomes(
        "tests.fuzz.aiter_modules", range(DRAWS or 40), seconds=60.0, environment=_ON_CPU
    )
    assert found["ran as it is"] > 5 and found["ran"] >= 2, found
    assert len([x for x in found if x.startswith("refused: ")]) > 5, found
