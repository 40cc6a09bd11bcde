"""Calls that AITER's ASM kernels run, small enough to interpret, and orders of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attn_dispatch_tools.verify.case import Case
from tests.support.cdna.machine import Landing, Schedule

NAN = 0x7FC00BAD
STRICT = Schedule("late", conflicts=True, registers=True, fill=NAN)
"""Data arrives as late as it may, and NaN is in registers and LDS."""
BACKWARDS = Schedule("late", seed=-1, quantum=50, conflicts=True, registers=True)
TIMED = Schedule("timed", seed=1, conflicts=True, fill=NAN)
RANDOM = Schedule("random", seed=2, quantum=100, conflicts=True)
SCHEDULES = (STRICT, BACKWARDS, TIMED, RANDOM)


@dataclass(frozen=True)
class KernelCase:
    """A call, and the files of the kernels that must run, "ck" for a call of CK's."""

    arch: str
    case: Case
    kernels: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.arch} {self.case}"

    @property
    def allowed(self) -> float:
        """The allowed share of the conformance suite's errors.

        The float16 kernels of gfx942 round towards zero (v_cvt_pkrtz_f16_f32), which doubles them.
        """
        return 2 if self.arch == "gfx942" and self.case.dtype == "float16" else 1


def case(name: str, **facts: Any) -> Case:
    usual: dict[str, Any] = {"b": 1, "t": 144, "s": 160, "n": 2, "k": 1, "h": 128}
    facts = usual | {"dtype": "bfloat16", "scale": 0.08} | facts
    return Case(f"cdna/{name}", **({"v": facts["h"]} | facts))


TOP_LEFT: dict[str, Any] = {"is_causal": True}
CAUSAL: dict[str, Any] = {"is_causal": True, "alignment": "bottom_right"}
_F16: dict[str, Any] = {"dtype": "float16"}
_BATCH: dict[str, Any] = {"b": 2, "n": 4, "k": 2, "t": 257, "s": 70}
_PACKED: dict[str, Any] = {
    "t": 280, "s": 300, "cu_q": ((0, 130, 280),), "cu_kv": ((0, 140, 300),), "longest": (150, 160)
}  # fmt: skip


def _gfx942(forward: str, backward: str, case: Case) -> KernelCase:
    return KernelCase("gfx942", case, (forward, backward))


def _gfx950(forward: str, backward: str, case: Case) -> KernelCase:
    return KernelCase("gfx950", case, (forward, backward))


_FULL, _FULL_CAUSAL = "fwd_hd128_bf16_rtne", "fwd_hd128_bf16_causal_rtne"
_BACK, _BACK_CAUSAL = "bwd_hd128_bf16_a32_rtne_psskddv", "bwd_hd128_bf16_causal_br_a32_rtne_psskddv"
_950_CAUSAL = "bwd_hd128_bf16_causal_br_a32_psskddv"
CASES = (
    _gfx942(_FULL, _BACK, case("full")),
    _gfx942(_FULL_CAUSAL, _BACK_CAUSAL, case("causal", **CAUSAL)),
    _gfx942(_FULL_CAUSAL, _BACK_CAUSAL, case("ragged", t=200, s=131, **CAUSAL)),
    _gfx942(_FULL_CAUSAL, _BACK_CAUSAL, case("few keys", t=300, s=20, **CAUSAL)),
    _gfx942(_FULL, _BACK, case("batch", **_BATCH)),
    _gfx942("ck", "bwd_hd128_bf16_causal_a32_rtne_psskddv", case("top left", s=260, **TOP_LEFT)),
    _gfx942("ck", "bwd_hd128_bf16_swa_a32_rtne_psskddv", case("window", window=(30, 20))),
    _gfx942("ck", "bwd_hd128_fp16_a32_psskddv", case("fp16", **_F16, t=131, s=97)),
    _gfx942("ck", "bwd_hd128_bf16_causal_br_a32_rtne_psskddv", case("d72", h=72, t=140, **CAUSAL)),
    _gfx942("ck", "bwd_hd64_bf16_a32_rtne_pssk", case("d64", h=64)),
    _gfx942("ck", "bwd_hd64_fp16_causal_br_a32_pssk", case("d64 f16", h=64, **_F16, **CAUSAL)),
    _gfx942("ck", "bwd_hd192_bf16_a32_rtne_psskddv", case("d192", h=192, t=100, s=90)),
    _gfx942("fwd_hd128_bf16_rtne_group", "ck", case("packed", **_PACKED)),
    _gfx950("fwd_hd128_bf16", "bwd_hd128_bf16_a32_psskddv", case("full")),
    _gfx950("ck", "bwd_hd128_fp16_a32_psskddv", case("fp16", **_F16, t=131, s=97)),
    _gfx950("fwd_hd128_bf16", "bwd_hd128_bf16_a32_psskddv", case("batch", **_BATCH)),
    _gfx950("fwd_hd128_bf16_causal", _950_CAUSAL, case("causal", **CAUSAL)),
    _gfx950("ck", "bwd_hd192_hd128_bf16_a32_pssk", case("d192", h=192, v=128)),
    _gfx950("fwd_hd128_bf16_group", "bwd_hd128_bf16_a32_psskddv_group", case("packed", **_PACKED)),
)  # fmt: skip

GAPS: dict[str, Any] = {"b": 2, "q_lengths": (100, 144), "kv_lengths": (160, 131)}
_LONG_GAPS: dict[str, Any] = {"b": 2, "q_lengths": (100, 290), "kv_lengths": (160, 300)}
CASES_V0_1_15 = (
    case("full"),
    case("causal", **CAUSAL),
    case("ragged", t=200, s=131, **CAUSAL),
    case("gaps", **GAPS),
    case("causal gaps", **GAPS, **CAUSAL),
    case("causal blocks", t=300, s=300, k=2, **TOP_LEFT),
    case("causal blocks with gaps", t=300, s=300, **_LONG_GAPS, **CAUSAL),
)
"""Calls of which AITER v0.1.15 and later run both passes on ASM."""

UNSAFE: tuple[tuple[KernelCase, Schedule | None], ...] = (
    (_gfx950("ck", "bwd_hd128_bf16_causal_a32_psskddv", case("top left", s=260, **TOP_LEFT)),
     Schedule("random", seed=1, quantum=100)),
    (_gfx950("fwd_hd128_bf16_causal", _950_CAUSAL, case("long", t=600, s=20, **CAUSAL)), None),
)  # fmt: skip
"""Calls of kernels in which a barrier is missing, and an order of events that shows it in results.

The conflicting accesses are some 2,000 and 3,500 cycles apart in times like hardware's.
"""

_LANDINGS: tuple[Landing, ...] = ("late", "random", "timed")


def drawn(seed: int) -> tuple[str, Case, Schedule]:
    """An architecture, a dense call whose backward pass is ASM's, and an order of events."""
    random = np.random.default_rng(seed)
    t, s = (int(x) for x in random.integers(17, 300, 2))
    groups, kv_heads = (int(x) for x in random.integers(1, 3, 2))
    mask = (TOP_LEFT, CAUSAL, {}, {})[random.integers(4)]
    arch = ("gfx942", "gfx950")[random.integers(2)]
    if arch == "gfx950":
        mask = {}  # barriers are missing in its causal kernels
    head_dim = int(random.choice((64, 72, 104, 128, 160, 192) if arch == "gfx942" else (72, 128)))
    call = case(
        f"drawn {seed}", b=int(random.integers(1, 3)), t=t, s=s, n=groups * kv_heads, k=kv_heads,
        h=head_dim, dtype=str(random.choice(("bfloat16", "float16"))), **mask,
    )  # fmt: skip
    return arch, call, drawn_schedule(random)


def drawn_schedule(random: np.random.Generator) -> Schedule:
    landing = _LANDINGS[random.integers(3)]
    return Schedule(
        landing, seed=int(random.integers(1, 1000)), quantum=int(random.integers(1, 400)),
        conflicts=True, registers=landing == "late", fill=NAN,
    )  # fmt: skip
