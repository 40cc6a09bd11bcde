"""The kernel of the forward-mode derivative, over stand-ins that compute, and every reason.

Results are filled with NaN before. The stand-ins read strides, so a wrong one gives wrong numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import fa4
from attn_dispatch.call.options import FORWARD_MODE
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.eligibility import reasons_and_chain
from attn_dispatch.devices import clear_rows
from attn_dispatch.devices.target import parse
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.reference import poison_padding, reference
from tests.support.comparing import to_jax
from tests.support.fa4_emulated import needs_computing_kernels

pytestmark = pytest.mark.usefixtures("kernels_that_compute")

SM90, SM100 = parse("sm90"), parse("sm100")

Arrays = dict[str, Any]

PLAIN = Case("plain", b=2, t=70, s=70, n=4, k=2, h=64, v=64, dtype="bfloat16")


@pytest.fixture(autouse=True)
def _rows_cleared_by_jax(monkeypatch):
    monkeypatch.setattr(clear_rows, "_native", lambda: None)


def asked(case: Case) -> AttentionSpec:
    spec = spec_of(case.forward_options(), case.avals())
    return spec.returning(replace(spec.wanted, derivative=FORWARD_MODE))


CASES = {
    "full": PLAIN,
    "causal": replace(PLAIN, is_causal=True),
    "causal from the bottom right": replace(PLAIN, is_causal=True, alignment="bottom_right"),
    "another number of keys": replace(PLAIN, t=33, s=130, n=2),
    "padded columns": replace(PLAIN, h=40, v=24, is_causal=True),
    "two head dims": replace(PLAIN, h=192, v=128, is_causal=True),
    "one key head": replace(PLAIN, k=1, dtype="float16"),
    "a negative scale": replace(PLAIN, scale=-0.2, is_causal=True),
    "a scale of 0": replace(PLAIN, scale=0.0),
    "causality and fewer keys": replace(PLAIN, is_causal=True, t=130),
    "causality from the bottom right and fewer keys": replace(
        PLAIN, is_causal=True, t=130, alignment="bottom_right"
    ),
    "causality from the bottom right and more keys": replace(
        PLAIN, is_causal=True, s=150, alignment="bottom_right"
    ),
    "a causal window": replace(PLAIN, t=200, s=200, window=(20, 0)),
    "a window of both sides": replace(PLAIN, t=200, s=200, window=(20, 9)),
    "a window from the bottom right": replace(
        PLAIN, t=90, s=200, window=(20, 9), alignment="bottom_right"
    ),
    "a window that leaves rows without keys": replace(PLAIN, t=200, s=100, window=(9, 0)),
    "a mask": replace(PLAIN, mask=(1, 1, 70, 70)),
    "a mask of heads": replace(PLAIN, mask=(2, 4, 70, 70), is_causal=True),
    "sinks": replace(PLAIN, sinks=1, is_causal=True),
    "sinks of rows": replace(PLAIN, sinks=2),
}


PACKED = replace(PLAIN, b=1, t=150, s=150)
_IDS = ((*[1] * 60, *[2] * 5, *[3] * 70, *[0] * 15),)
PACKED_CASES = {
    "lengths": replace(PLAIN, t=90, s=90, q_lengths=(90, 33), kv_lengths=(70, 0)),
    "lengths, causal": replace(PLAIN, t=90, s=90, kv_lengths=(70, 33), is_causal=True),
    "segment ids": replace(PACKED, q_segments=_IDS, kv_segments=_IDS),
    "segment ids, a window": replace(
        PACKED, q_segments=_IDS, kv_segments=_IDS, max_segments=3, window=(9, 3)
    ),
    "segment ids, causal, one key head": replace(
        PACKED, q_segments=_IDS, kv_segments=_IDS, max_segments=4, is_causal=True, k=1
    ),
    "an id beyond max_segments": replace(
        PACKED, q_segments=_IDS, kv_segments=_IDS, max_segments=2, is_causal=True
    ),
    "cu_seqlens": replace(
        PACKED, cu_q=((0, 50, 120, 140),), cu_kv=((0, 20, 120, 149),), longest=(70, 100)
    ),
    "cu_seqlens, causal": replace(
        PACKED, cu_q=((0, 50, 120, 140),), cu_kv=((0, 20, 120, 149),), longest=(70, 100),
        is_causal=True, alignment="bottom_right",
    ),
    "cu_seqlens, a window": replace(
        PACKED, cu_q=((0, 50, 120, 140),), cu_kv=((0, 50, 120, 140),), longest=(70, 70),
        window=(9, 3),
    ),
}  # fmt: skip


def reference_tangents(spec: AttentionSpec, exact: Arrays, moved: Arrays) -> list[np.ndarray]:
    """The tangents of out and lse as central differences in float64; 0 where there is none."""

    def results(step: float) -> list[np.ndarray]:
        now = exact | {x: exact[x] + step * y for x, y in moved.items()}
        return [reference(spec.options, now)[x] for x in ("out", "lse")]

    step = 1e-5
    with np.errstate(invalid="ignore"):
        found = [(x - y) / (2 * step) for x, y in zip(results(step), results(-step), strict=True)]
    return [np.nan_to_num(x, nan=0) for x in found]


@needs_computing_kernels
@pytest.mark.parametrize("moving", ["all", "value"])
@pytest.mark.parametrize("name", {**CASES, **PACKED_CASES})
def test_tangents_agree_with_differences_in_float64(name: str, moving: str):
    """Padding of operands and tangents holds NaN."""
    case = {**CASES, **PACKED_CASES}[name]
    spec = asked(case)
    assert fa4.not_supported_reasons(spec, SM90) == ()
    arrays, others = case.operands(), replace(case, name=f"{case.name}, tangents").operands()
    names = case.differentiable if moving == "all" else ("value",)
    exact = {x: _wide(y) if x in case.differentiable else y for x, y in arrays.items()}
    expected = reference_tangents(spec, exact, {x: _wide(others[x]) for x in names})
    results = reference(spec.options, exact)
    known = poison_padding(spec.options, arrays) | {
        "out": results["out"].astype(arrays["query"].dtype),
        "lse": results["lse"].astype(np.float32),
    }
    moved = {x: poison_padding(spec.options, others)[x] for x in names}
    compute = jax.jit(lambda known, moved: fa4.tangents(spec, SM90, known, moved))
    got = compute(to_jax(known), to_jax(moved))
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        assert np.abs(_wide(x) - y).max() <= 0.02 * max(np.abs(y).max(), 1e-3)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


REFUSED = {
    "a soft cap": (replace(PLAIN, soft_cap=2.0), "feature/logits_soft_cap"),
    "wide heads": (replace(PLAIN, h=256, v=256), "fa4/tangent"),
    "float32": (replace(PLAIN, dtype="float32"), "dtype"),
    "no keys": (replace(PLAIN, s=0), "empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_calls_are_refused_with_the_reason(name: str):
    case, rule = REFUSED[name]
    assert rule in {x.rule for x in fa4.not_supported_reasons(asked(case), SM90)}


@pytest.mark.parametrize(
    ("device", "compiled_for"),
    [(SM90, "head dims 64, 192/128 in bfloat16; head dims 64 in float16"), (SM100, "no head dims")],
)
def test_the_reason_names_the_kernels_that_there_are(device, compiled_for: str):
    reasons = fa4.not_supported_reasons(asked(replace(PLAIN, h=256, v=256)), device)
    assert [x.text for x in reasons if x.rule == "fa4/tangent"] == [
        f"kernels of forward-mode derivatives are compiled for {compiled_for}, got 256/256 bfloat16"
    ]


def test_the_limit_on_scratch_memory_holds_for_tangents():
    spec = asked(replace(PLAIN, t=2048, s=2048, mask=(1, 1, 2048, 2048)))
    assert not reasons_and_chain(fa4, spec, SM90)[0]
    with attn_dispatch.scratch_limit("100 kB"):
        (reason,) = reasons_and_chain(fa4, spec, SM90)[0]
    assert reason.rule == "scratch_limit"


def test_the_plan_names_the_kernel_and_counts_padded_copies():
    plain, padded = (fa4.plan(asked(CASES[x]), SM90) for x in ("full", "padded columns"))
    assert plain.engine.endswith("kernel of the derivative")
    assert plain.workspace_bytes == 0
    assert padded.other_bytes > plain.other_bytes > 0  # the mask is there in both
