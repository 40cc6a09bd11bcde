"""Programs on the CPU as an H100 would be given them, on stand-ins for fa4's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from attn_dispatch import fallback, target
from attn_dispatch.core import formulas, primitive, select, tangents
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.target import parse
from attn_dispatch.fa4 import compiled
from tests.support.fa4_emulated import emulated


def install(patch: pytest.MonkeyPatch) -> None:
    """Let programs that are lowered for the CPU get what an H100 would get."""
    library = emulated().library
    patch.setattr(compiled, "find", lambda: library)
    patch.setattr(clear_rows, "_native", lambda: None)
    for module in (primitive, tangents, formulas):
        patch.setattr(module, "device_for", lambda platform: parse("sm90"))


@contextmanager
def h100(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A block of such programs, which warn of no fallback."""
    install(patch)
    select.is_installed.cache_clear()
    jax.clear_caches()
    with target("sm90"), fallback("silent"):
        yield
    select.is_installed.cache_clear()
    jax.clear_caches()
