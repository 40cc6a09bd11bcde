"""The kernel of the forward-mode derivative, over stand-ins that compute, and every reason.

Results are filled with NaN before. The stand-ins read strides, so a wrong one gives wrong numbers.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import fa4, xla
from attn_dispatch.call.options import FORWARD_MODE
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.target import parse
from attn_dispatch.fa4 import compiled
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.fa4_emulated import emulated, needs_computing_kernels

SM90, SM100 = parse("sm90"), parse("sm100")

PLAIN = Case("plain", b=2, t=70, s=70, n=4, k=2, h=64, v=64, dtype="bfloat16")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    library = emulated().library
    monkeypatch.setattr(compiled, "find", lambda: library)
    monkeypatch.setenv("ATTN_DISPATCH_POISON", "1")


def asked(case: Case) -> AttentionSpec:
    spec = spec_of(case.forward_options(), case.avals())
    return spec.returning(replace(spec.wanted, derivative=FORWARD_MODE))


def drawn(spec: AttentionSpec) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """query, key and value, and their tangents."""
    names = ("query", "key", "value")
    keys = iter(jax.random.split(jax.random.key(0), 6))
    arrays, moved = (
        {x: jax.random.normal(next(keys), spec.shape(x)).astype(spec.dtype) for x in names}
        for _ in range(2)
    )
    return arrays, moved


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
}


@needs_computing_kernels
@pytest.mark.parametrize("moving", ["all", "value"])
@pytest.mark.parametrize("name", CASES)
def test_tangents_agree_with_formulas(name: str, moving: str):
    spec = asked(CASES[name])
    assert fa4.not_supported_reasons(spec, SM90) == ()
    arrays, moved = drawn(spec)
    if moving == "value":
        moved = {"value": moved["value"]}
    exact, exact_moved = (
        {x: y.astype(jnp.float32) for x, y in one.items()} for one in (arrays, moved)
    )

    def formula(given):
        return xla.formula(spec, exact | given)

    primals = {x: exact[x] for x in moved}
    (out, lse), expected = jax.jvp(formula, (primals,), (exact_moved,))
    known = arrays | {"out": out.astype(spec.dtype), "lse": lse}
    got = jax.jit(lambda known, moved: fa4.tangents(spec, SM90, known, moved))(known, moved)
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        error = np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64))
        assert error.max() <= 0.02 * max(np.abs(y).max(), 1e-3)


REFUSED = {
    "a window": (replace(PLAIN, window=(3, 0)), "fa4/tangent_window"),
    "causality": (replace(PLAIN, is_causal=True, s=71), "fa4/tangent_causal"),
    "a mask": (replace(PLAIN, mask=(1, 1, 70, 70)), "feature/mask"),
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


def test_the_plan_names_the_kernel_and_counts_padded_copies():
    plain, padded = (fa4.plan(asked(CASES[x]), SM90) for x in ("full", "padded columns"))
    assert plain.engine.endswith("kernel of the derivative")
    assert (plain.workspace_bytes, plain.other_bytes) == (0, 0)
    assert padded.other_bytes > 0
