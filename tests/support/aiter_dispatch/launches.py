"""Shared parts of the tests of AITER's dispatch: architectures, and the kernel of a launch."""

from __future__ import annotations

import pytest

from attn_dispatch.aiter.call import AiterCall
from attn_dispatch.aiter.kernels import Accumulator
from tests.support.aiter_dispatch import build

ARCHS = pytest.mark.parametrize("arch", build.ARCHS)


def atomic_32(call: AiterCall) -> Accumulator:
    return "atomic_32" if call.backward else "split"


def launched(call: AiterCall, records: list[str]) -> tuple[str, str]:
    """The name and file of the one ASM kernel that the records show.

    In a backward pass CK's kernels must run before and after it.
    """
    assert not [line for line in records if line.startswith("missing ")], records
    (line,) = (line for line in records if line.startswith("asm "))
    if call.backward:
        assert records == ["dot_do_o", line, "convert_dq"]
    _, name, file = line.split()
    return name, file
