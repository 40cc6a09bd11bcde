"""A float32 bias converted to 16 bits, for kernels that take no other, if that changes no number.

A mask of 0 and -inf is such a bias, and so is one that was computed in 16 bits. As this depends on
values, the compiled program tests the bias and has both branches: the kernel and XLA.
"""

from __future__ import annotations

from typing import cast

import jax

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites.rewrite import AskedOf, Calls, NamedArrays, Rewrite, changed
from attn_dispatch.typed_jax import precision_of


def _when(spec: AttentionSpec) -> bool:
    if spec.dtype not in ("float16", "bfloat16"):
        return False
    # row_bias.py computes a bias that is the same for all keys exactly.
    return spec.dtype_of("bias") != spec.dtype and spec.shape("bias")[3] != 1


def _compute(
    spec: AttentionSpec, inner: AttentionSpec, operands: NamedArrays, calls: Calls
) -> NamedArrays:
    bias = operands["bias"]
    # XLA would remove a conversion to 16 bits and back. NaN differs from itself, so a bias with NaN
    # is left to XLA.
    rounded = jax.lax.reduce_precision(bias, *precision_of(spec.dtype))
    is_exact = (rounded == bias).all()

    def by_kernel(operands: NamedArrays) -> NamedArrays:
        narrow = operands["bias"].astype(spec.dtype)
        results = dict(calls.kernel(operands | {"bias": narrow}))
        if "bias" in results:
            results["bias"] = results["bias"].astype(bias.dtype)
        return {name: results[name] for name in spec.result_names}

    def by_xla(operands: NamedArrays) -> NamedArrays:
        return dict(calls.xla(spec, operands))

    return cast("NamedArrays", jax.lax.cond(is_exact, by_kernel, by_xla, operands))


NARROW_BIAS = Rewrite(
    "the bias: in 16 bits where that changes nothing, else XLA, decided when it runs",
    lambda spec: changed(spec, arrays={"bias": (spec.shape("bias"), spec.dtype)}),
    _compute,
    asked_of=AskedOf(("bias",)),
    when=_when,
    # XLA draws another dropout mask.
    moves_dropout=True,
    may_fall_back=True,
)
