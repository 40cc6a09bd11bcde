"""Serialized programs with changed custom calls are refused by name, or run."""

from __future__ import annotations

from tests.fuzz.child import DRAWS, outcomes
from tests.support import aiter_emulated
from tests.support.backend import needs_cudnn, needs_no_driver

_ON_CPU = {"JAX_PLATFORMS": "cpu"}


@needs_cudnn
@needs_no_driver  # with a driver the library would plan for the device
def test_changed_modules_with_cudnn_calls_are_refused_or_accepted():
    """The attributes are checked at compilation; no device runs the modules."""
    found = outcomes("tests.fuzz.modules", range(DRAWS or 120), seconds=60.0, environment=_ON_CPU)
    assert found["taken"] > 10
    assert len([x for x in found if x.startswith("refused: ")]) > 12, found
    print(dict(found.most_common()))


def test_changed_modules_with_aiter_calls_are_refused_or_run():
    """The modules run on the emulator."""
    aiter_emulated.library()  # compiling it takes longer than the time of a draw
    found = outcomes(
        "tests.fuzz.aiter_modules", range(DRAWS or 40), seconds=60.0, environment=_ON_CPU
    )
    assert found["ran as it is"] > 5 and found["ran"] >= 2, found
    assert len([x for x in found if x.startswith("refused: ")]) > 5, found
