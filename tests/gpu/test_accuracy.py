"""cuDNN against the float64 reference, judged by the error of the plain XLA computation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_dispatch
from attn_dispatch import cudnn, select
from attn_dispatch.padding import pad_last
from attn_dispatch.target import default_device
from backend import backward_spec, forward_spec
from cases import Case
from kernel_cases import KERNEL_CASES
from reference import allowed, reference

NAMES = ("out", "lse", "query", "key", "value")


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_accuracy(case, record):
    operands = case.operands() | case.cotangents()
    forward_reasons, backward_reasons = refusals(case)
    if forward_reasons:
        record(case=case.name, refused=forward_reasons)
        pytest.skip("; ".join(forward_reasons))
    # What cuDNN refuses to differentiate is XLA's, forward results stay cuDNN's.
    backward = "xla" if backward_reasons else "cudnn"
    got = ours(case, operands, ("cudnn", "xla"))
    expected = reference(case.forward_options(), operands)
    plain = plain_xla(case, operands)
    errors = {name: error(got[name], expected[name]) for name in NAMES}
    plain_errors = {name: error(plain[name], expected[name]) for name in NAMES}
    record(
        case=case.name, backward=backward, reasons=backward_reasons,
        engines=engines(case, has_backward=not backward_reasons),
        error=errors, plain_xla_error=plain_errors,
    )  # fmt: skip
    for name in NAMES:
        assert errors[name] <= 2 * plain_errors[name] + 1e-5, (name, errors, plain_errors)


def refusals(case: Case) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """cuDNN's reasons against the forward and the backward call of a case."""
    device = default_device()
    return (
        cudnn.not_supported_reasons(forward_spec(case), device),
        cudnn.not_supported_reasons(backward_spec(case), device),
    )


def engines(case: Case, *, has_backward: bool) -> list[str]:
    """cuDNN's engines for the forward and the backward call: what tells two versions apart."""
    specs = [forward_spec(case)] + [backward_spec(case)] * has_backward
    return [cudnn.plan(spec, default_device()).engine for spec in specs]


def ours(case: Case, operands, implementation) -> dict[str, np.ndarray]:
    def call(q, k, v):
        return attn_dispatch.dot_product_attention(
            q, k, v, scale=case.scale, is_causal=case.is_causal,
            causal_alignment=case.alignment, return_lse=True, implementation=implementation,
        )  # fmt: skip

    @jax.jit
    def run(q, k, v, out_grad):
        # Only out is differentiated, as in training; lse comes from the same call.
        out, pull, lse = jax.vjp(call, q, k, v, has_aux=True)
        return out, lse, *pull(out_grad)

    arrays = [jnp.asarray(operands[name]) for name in ("query", "key", "value", "out_grad")]
    compiled = run.lower(*arrays).compile()
    assert cudnn.FORWARD_TARGET in compiled.as_text()
    out, lse, *gradients = compiled(*arrays)
    results = (out, jnp.swapaxes(lse, 1, 2), *gradients)
    return {name: np.asarray(x, np.float64) for name, x in zip(NAMES, results, strict=True)}


def plain_xla(case: Case, operands) -> dict[str, np.ndarray]:
    """jax.nn's XLA implementation in the same dtype; rows that attend nothing are zeroed."""
    mask = jnp.asarray(allowed(case.forward_options(), operands))
    is_live = mask.any(axis=-1)
    widest = max(case.h, case.v)

    @jax.jit
    def run(q, k, v, out_grad):
        def call(q, k, v):
            # jax.nn wants one head dim for all three; zero columns change nothing.
            padded = [pad_last(x, widest) for x in (q, k, v)]
            out, lse = jax.nn.dot_product_attention(
                *padded, mask=mask, scale=case.scale, implementation="xla", return_residual=True
            )
            return jnp.where(is_live.swapaxes(1, 2)[..., None], out[..., : case.v], 0), lse

        out, pull, lse = jax.vjp(call, q, k, v, has_aux=True)
        lse = jnp.where(is_live, lse.swapaxes(1, 2), -jnp.inf)
        return out, lse, *pull(out_grad)

    arrays = [jnp.asarray(operands[name]) for name in ("query", "key", "value", "out_grad")]
    return {name: np.asarray(x, np.float64) for name, x in zip(NAMES, run(*arrays), strict=True)}


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference; infinite where infinities or NaN are not where they belong."""
    same_infinities = np.array_equal(np.isneginf(got), np.isneginf(expected))
    finite = np.isfinite(expected)
    if not same_infinities or not np.isfinite(got[finite]).all():
        return float("inf")
    return float(np.max(np.abs(got[finite] - expected[finite]), initial=0))


def test_unset_preference_takes_cudnn():
    q = jax.ShapeDtypeStruct((2, 256, 8, 64), jnp.bfloat16)
    explanation = attn_dispatch.explain(q, q, q, is_causal=True)
    assert (explanation.chosen_forward, explanation.chosen_backward) == ("cudnn", "cudnn")
    assert explanation.device.is_present
    assert select.names()[0] == "cudnn"
