"""Comparison of results with the float64 reference, and operands with NaN in padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.devices.device import Device
from attn_dispatch.devices.implementation import Implementation
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.reference import Operands, poison_padding, reference


def to_jax(arrays: Operands) -> dict[str, Any]:
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def check(spec: AttentionSpec, results: tuple[Any, ...], expected: Operands) -> None:
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in spec.results]
    for name, got in zip(spec.result_names, results, strict=True):
        if name != "keep":
            x = expected[name]
            close = 1e-4 * np.abs(x[np.isfinite(x)]).max(initial=1)
            np.testing.assert_allclose(got, x, rtol=1e-4, atol=close, err_msg=name)


def check_both_directions(implementation: Implementation, device: Device, case: Case) -> None:
    """Compare a call's results and gradients by an implementation with the reference.

    Each direction is one compiled program.
    """
    operands = case.operands()
    spec = spec_of(case.forward_options(), case.avals())
    exact = reference(spec.options, operands)
    forward = jax.jit(partial(implementation.forward, spec, device))
    check(spec, forward(to_jax(poison_padding(spec.options, operands))), exact)
    operands |= case.cotangents() | {x: exact[x].astype(np.float32) for x in ("out", "lse")}
    spec = spec.backward(case.backward_options(case.wanted or None))
    backward = jax.jit(partial(implementation.backward, spec, device))
    results = backward(to_jax(poisoned(spec, operands)))
    check(spec, results, reference(spec.options, operands))


def poisoned(spec: AttentionSpec, operands: Operands) -> Operands:
    """The operands with NaN in padding.

    lse comes from the forward pass, so it holds -inf in padding rows and, in place of NaN, in
    invalid rows.
    """
    lse = np.where(np.isnan(operands["lse"]), np.float32(-np.inf), operands["lse"])
    return poison_padding(spec.options, operands) | {"lse": lse}
