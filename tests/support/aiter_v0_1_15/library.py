"""The libraries of build.py, each loaded once."""

from __future__ import annotations

from functools import cache

from tests.support.aiter_dispatch import api
from tests.support.aiter_v0_1_15 import build


def dispatch(arch: str) -> api.Library:
    """AITER's dispatch of an architecture, on a GPU of it."""
    found = _loaded(arch)
    found.set_gpu(arch)
    found.take_launches()
    return found


@cache
def _loaded(arch: str) -> api.Library:
    return api.Library(build.dispatch(arch))


@cache
def capture(arch: str) -> api.Library:
    """The adapter before a recorder of AITER's arguments, on a GPU of an architecture."""
    found = api.Library(build.capture(arch))
    found.set_gpu(arch)
    return found
