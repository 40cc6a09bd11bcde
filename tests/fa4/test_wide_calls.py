"""Calls with head dims beyond 256, over stand-ins that compute, and every reason.

Results are filled with NaN before. The stand-ins read strides, so a wrong one gives wrong numbers.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch import fa4, xla
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.target import parse
from attn_dispatch.fa4 import compiled, wide_calls
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.fa4_emulated import needs_computing_kernels

pytestmark = pytest.mark.usefixtures("kernels_that_compute")

SM90, SM100 = parse("sm90"), parse("sm100")

PLAIN = Case("plain", b=2, t=70, s=70, n=4, k=2, h=512, v=512, dtype="bfloat16")
CAUSAL = replace(PLAIN, is_causal=True)
BOTTOM = replace(CAUSAL, alignment="bottom_right")


def backward_spec(case: Case) -> AttentionSpec:
    avals = case.avals()
    number = jax.ShapeDtypeStruct((case.b, case.n, case.t), jnp.float32)
    out = jax.ShapeDtypeStruct((case.b, case.t, case.n, case.v), case.dtype)
    residuals = {"out": out, "lse": number, "out_grad": out, "lse_grad": number}
    return spec_of(case.backward_options(), avals | residuals)


def drawn(case: Case) -> dict[str, jax.Array]:
    """The operands of a backward pass, but for out and lse."""
    spec = backward_spec(replace(case, lse_grad=True))
    names = ("query", "key", "value", "out_grad", "lse_grad")
    keys = jax.random.split(jax.random.key(0), len(names))
    return {
        x: jax.random.normal(key, spec.shape(x)).astype("float32" if "lse" in x else case.dtype)
        for x, key in zip(names, keys, strict=True)
    }


CASES = {
    "full": PLAIN,
    "causal": CAUSAL,
    "causal with a gradient of lse": replace(CAUSAL, lse_grad=True),
    "rows that see nothing": replace(BOTTOM, t=90, lse_grad=True),
    "more keys, bottom right": replace(BOTTOM, s=130, lse_grad=True),
    "more keys, top left": replace(CAUSAL, s=130, lse_grad=True),
    "another number of keys": replace(PLAIN, t=33, s=130, n=2),
    "keys after the diagonal": replace(CAUSAL, window=(None, 3), is_causal=False, s=90),
    "a window that hides nothing": replace(CAUSAL, window=(69, 0), is_causal=False),
    "keys before the diagonal": replace(BOTTOM, window=(None, -3), is_causal=False),
    "a band that hides nothing": replace(CAUSAL, t=1, s=1),
    "one query": replace(BOTTOM, t=1, s=40),
    "320 columns": replace(PLAIN, h=320, v=320, lse_grad=True),
    "columns that are padded": replace(BOTTOM, h=259, v=261, t=80, lse_grad=True),
    "two head dims": replace(CAUSAL, h=320, v=64),
    "one key head": replace(CAUSAL, k=1, dtype="float16", lse_grad=True),
    "as many key heads": replace(PLAIN, k=4),
    "a negative scale": replace(CAUSAL, scale=-0.2),
    "a scale of 0": replace(PLAIN, scale=0.0),
    "a deterministic backward pass": replace(CAUSAL, deterministic=True),
    "gradients of two": replace(PLAIN, wanted=("query", "value")),
}


@needs_computing_kernels
@pytest.mark.parametrize("name", CASES)
def test_both_passes_agree_with_formulas(name: str):
    case = replace(CASES[name], scale=CASES[name].scale / 3)
    spec, forward = backward_spec(case), spec_of(case.forward_options(), case.avals())
    for x in (spec, forward):
        assert fa4.not_supported_reasons(x, SM90) == ()
    arrays = drawn(case)
    exact = {x: y.astype(jnp.float32) for x, y in arrays.items()}
    primals = {x: exact[x] for x in ("query", "key", "value")}
    (out, lse), transposed = jax.vjp(lambda given: xla.formula(forward, given), primals)
    sees = jnp.isfinite(lse)
    lse_grad = jnp.where(sees, exact["lse_grad"], 0) if case.lse_grad else jnp.zeros_like(lse)
    (gradients,) = transposed((arrays["out_grad"], lse_grad))

    got_out, *got_lse = jax.jit(lambda x: fa4.forward(forward, SM90, x))(arrays)
    close(got_out, out)
    for x in got_lse:
        assert (jnp.isfinite(x) == sees).all() and (x[~sees] == -jnp.inf).all()
        np.testing.assert_allclose(x[sees], lse[sees], rtol=1e-3, atol=1e-3)
    # What belongs to a row that sees nothing may be anything.
    rows = sees.swapaxes(1, 2)[..., None]
    known = arrays | {"out": jnp.where(rows, out, jnp.nan).astype(case.dtype), "lse": lse}
    known["out_grad"] = jnp.where(rows, known["out_grad"], jnp.nan)
    if case.lse_grad:
        known["lse_grad"] = jnp.where(sees, known["lse_grad"], jnp.nan)
    else:
        known.pop("lse_grad")
    found = jax.jit(lambda x: fa4.backward(spec, SM90, x))(known)
    for x, wanted in zip(found, spec.wanted.gradients, strict=True):
        close(x, gradients[wanted])


def close(got: jax.Array, expected: jax.Array) -> None:
    assert got.shape == expected.shape
    error = np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64))
    assert error.max() <= 0.02 * max(np.abs(expected).max(), 1e-3)


IDS = ((1,) * 30 + (2,) * 40,)
REFUSED = {
    "a window": (replace(PLAIN, window=(3, 0)), "fa4/wide_window"),
    "a window of both sides": (replace(PLAIN, window=(3, 4)), "fa4/wide_window"),
    "a window that hides one key": (replace(PLAIN, window=(68, 0)), "fa4/wide_window"),
    "fewer keys, top left": (replace(CAUSAL, t=71), "fa4/wide_causal"),
    "no visible key": (replace(PLAIN, window=(None, -70)), "fa4/wide_causal"),
    "a mask": (replace(PLAIN, mask=(1, 1, 70, 70)), "feature/mask"),
    "lengths": (replace(PLAIN, kv_lengths=(7, 70)), "feature/lengths"),
    "segment ids": (
        replace(PLAIN, b=1, q_segments=IDS, kv_segments=IDS, max_segments=2),
        "feature/segment ids",
    ),
    "a soft cap": (replace(PLAIN, soft_cap=2.0), "feature/logits_soft_cap"),
    "sinks": (replace(PLAIN, sinks=1), "feature/sinks"),
    "a bias": (replace(PLAIN, bias=(1, 1, 70, 70)), "feature/bias"),
    "float32": (replace(PLAIN, dtype="float32"), "dtype"),
    "no keys": (replace(PLAIN, s=0), "empty"),
    "wider heads": (replace(PLAIN, h=576), "fa4/wide_head_dim"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_calls_are_refused_with_the_reason(name: str):
    case, rule = REFUSED[name]
    spec = spec_of(case.forward_options(), case.avals())
    assert rule in {x.rule for x in fa4.not_supported_reasons(spec, SM90)}


def test_the_reason_names_the_kernels_that_there_are(monkeypatch):
    spec = spec_of(PLAIN.forward_options(), PLAIN.avals())
    (reason,) = fa4.not_supported_reasons(spec.returning(spec.wanted), SM100)[-1:]
    assert reason.text == "kernels are compiled for head dims 64 in float16, got 512/512 bfloat16"
    assert reason.remedy == ""
    narrow = replace(compiled.find(), sets=tuple(x for x in compiled.find().sets if not x.is_wide))
    monkeypatch.setattr(compiled, "find", lambda: narrow)
    (reason,) = fa4.not_supported_reasons(spec, SM90)
    assert reason.rule == "fa4/wide_head_dim"
    assert reason.remedy == "run `attn-dispatch build-fa4 --add --arch sm90`"


def test_no_other_call_takes_these_kernels():
    library = compiled.find().on("sm90")
    case = replace(PLAIN, h=256, v=256)
    spec = spec_of(case.forward_options(), case.avals())
    assert "fa4/head_dim" in {x.rule for x in fa4.not_supported_reasons(spec, SM90)}
    assert library.set_for(256, 256, "bfloat16") is None
    wide = [wide_calls.kernels_for(spec_of(x.forward_options(), x.avals()), library)
            for x in (replace(PLAIN, h=257, v=8), replace(PLAIN, h=385, v=8))]  # fmt: skip
    assert [x and x.head_dim for x in wide] == [384, 512]


def test_a_wide_call_takes_no_arrays_of_a_mask():
    for spec in (backward_spec(CAUSAL), spec_of(CAUSAL.forward_options(), CAUSAL.avals())):
        assert fa4.mask_tiles(spec, SM90) is None


def test_the_plan_names_the_kernels_and_counts_copies_and_numbers_of_rows():
    padded = replace(PLAIN, h=300, v=300)
    forward, other = (
        fa4.plan(spec_of(x.forward_options(), x.avals()), SM90) for x in (PLAIN, padded)
    )
    assert forward.engine.endswith("head dims up to 512")
    assert other.engine.endswith("head dims up to 384")
    assert (forward.workspace_bytes, forward.other_bytes) == (0, 0) and other.other_bytes > 0
    rows = replace(BOTTOM, t=130, s=70)  # of which 70 see a key, rounded up to 128
    assert fa4.plan(backward_spec(rows), SM90).other_bytes == 2 * 4 * 2 * 4 * 128
