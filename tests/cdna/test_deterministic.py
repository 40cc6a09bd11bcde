"""One block of keys on gfx950, whose kernel adds to each element of dq once.

ATTN_DISPATCH_AITER_DIR is the folder of AITER's sources, v0.1.15 or later.
"""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

import numpy as np
import pytest

from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case
from tests.support.aiter_check import Check
from tests.support.cdna import generations
from tests.support.cdna.cases import BACKWARDS, CAUSAL, case
from tests.support.cdna.machine import Schedule

CASES = (
    case("full", t=150, s=256, deterministic=True),
    case("causal", t=150, s=200, h=96, deterministic=True, **CAUSAL),
)


@pytest.mark.parametrize("call", CASES, ids=str)
def test_gradients_are_the_same_bits_in_every_order(call: Case, without_rewrites: None):
    if missing := generations.missing("v0.1.15"):
        pytest.skip(missing)
    with generations.gpu_of("v0.1.15", "gfx950", ()) as gpu:
        check, found = Check.of(call, parse("gfx950"), gpu.emulator), []
        for gpu.schedule in (BACKWARDS, *(Schedule("random", seed=x, quantum=40) for x in (2, 3))):
            found.append(check.run())
        assert max(check.errors().values()) <= 1
        assert sum("a32" in x for x in gpu.ran) == len(found) + 1 and "ck" not in gpu.ran
    for name, first in found[0].items():
        assert all(np.array_equal(first, other[name]) for other in found[1:]), name
