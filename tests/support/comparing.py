"""Comparison of results with the float64 reference, and operands with NaN in padding."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch_tools.verify.reference import Operands, poison_padding


def to_jax(arrays: Operands) -> dict[str, Any]:
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def check(spec: AttentionSpec, results: tuple[Any, ...], expected: Operands) -> None:
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in spec.results]
    for name, got in zip(spec.result_names, results, strict=True):
        if name != "keep":
            x = expected[name]
            close = 1e-4 * np.abs(x[np.isfinite(x)]).max(initial=1)
            np.testing.assert_allclose(got, x, rtol=1e-4, atol=close, err_msg=name)


def poisoned(spec: AttentionSpec, operands: Operands) -> Operands:
    """The operands with NaN in padding.

    lse comes from the forward pass, so it holds -inf in padding rows and, in place of NaN, in
    invalid rows.
    """
    lse = np.where(np.isnan(operands["lse"]), np.float32(-np.inf), operands["lse"])
    return poison_padding(spec.options, operands) | {"lse": lse}
