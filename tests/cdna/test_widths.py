"""Head dims that are padded, on the machine code of AITER v0.1.15 or later.

ATTN_DISPATCH_AITER_DIR is the folder of its sources. There, ASM kernels alone are built.
"""

from __future__ import annotations

import os

os.environ["ATTN_DISPATCH_POISON"] = "1"  # read when a call is compiled

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case
from tests.support.aiter_check import Check
from tests.support.cdna import generations
from tests.support.cdna.cases import CAUSAL, SCHEDULES, TIMED, TOP_LEFT, case
from tests.support.cdna.kernels import Gpu

_GAPS: dict[str, Any] = {"b": 2, "q_lengths": (100, 144), "kv_lengths": (160, 131)}
_PACKED: dict[str, Any] = {
    "t": 280, "s": 280, "cu_q": ((0, 130, 280),), "cu_kv": ((0, 130, 280),), "longest": (150, 150),
}  # fmt: skip
CASES = (
    case("64", h=64),
    case("64 causal", h=64, t=160, **CAUSAL),
    case("64 gaps", h=64, **_GAPS),
    case("36 and 80", h=36, v=80),
    case("96 and 64", h=96, v=64, **_GAPS),
    case("packed from the top left", **_PACKED, **TOP_LEFT),
)


WINDOWS = (
    case("64 window", h=64, window=(30, 20)),
    case("40 and 64 window", h=40, v=64, window=(30, 20)),
)


@pytest.fixture
def gpu(without_rewrites: None, arch: str) -> Iterator[Gpu]:
    if missing := generations.missing("v0.1.15"):
        pytest.skip(missing)
    with ExitStack() as stack:
        yield stack.enter_context(generations.gpu_of("v0.1.15", arch, ()))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("call", CASES, ids=str)
def test_padded_head_dims_agree_with_the_reference(call: Case, arch: str, gpu: Gpu):
    gpu.schedule, gpu.ran = TIMED, []
    errors = Check.of(call, parse(arch), gpu.emulator).errors()
    assert any(x.startswith("fwd_hd128") for x in gpu.ran) and "ck" not in gpu.ran, gpu.ran
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("arch", ["gfx942"])
@pytest.mark.parametrize("call", WINDOWS, ids=str)
def test_padded_windows_agree_with_the_reference(call: Case, arch: str, gpu: Gpu):
    """Backward, on gfx942: no other kernel has windows."""
    for gpu.schedule in SCHEDULES:
        gpu.ran = []
        errors = Check.of(call, parse(arch), gpu.emulator).errors()
        assert "bwd_hd128_bf16_swa_a32_rtne_psskddv" in gpu.ran and "ck" not in gpu.ran, gpu.ran
        assert max(errors.values()) <= 1, errors
