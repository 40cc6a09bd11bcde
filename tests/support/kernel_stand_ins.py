"""Computation of a call without a GPU: NumPy in cuDNN's place, by cuDNN's rules, and XLA."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attn_dispatch import xla
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites import Chain
from attn_dispatch.cudnn import arrays as cudnn_arrays
from attn_dispatch.cudnn import rules as cudnn_rules
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.devices.target import CPU
from attn_dispatch.reason import Reason
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.cudnn_in_numpy import run

NamedArrays = dict[str, Any]


def kernel_reasons(spec: AttentionSpec) -> list[Reason]:
    """cuDNN's reasons against a call, except the dtype: float32 can be compared closely."""
    found = cudnn_rules.not_supported_reasons(spec)
    return [reason for reason in found if reason.rule != "dtype"]


def kernel(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> NamedArrays:
    """The results of a call by NumPy, as the first of cuDNN's variants of it.

    NumPy runs in a callback, so that a test can compile the operations around the kernel at once;
    one by one, they took twice the time.
    """
    call = variants_of(spec)[0]
    if spec.is_backward:
        given = cudnn_arrays.backward_operands(spec, call, operands)
        shapes, results_of = cudnn_arrays.backward_shapes(call), cudnn_arrays.backward_results
    else:
        given = cudnn_arrays.forward_operands(spec, call, operands)
        shapes, results_of = cudnn_arrays.forward_shapes(call), cudnn_arrays.forward_results
    types = {name: jax.ShapeDtypeStruct(x.shape, jnp.float32) for name, x in shapes.items()}

    def by_numpy(*given: Any) -> NamedArrays:
        found = run(call, list(given))
        return {name: found[name].reshape(x.shape) for name, x in types.items()}

    done = jax.pure_callback(by_numpy, types, *given)
    return dict(zip(spec.result_names, results_of(spec, call, operands, done), strict=True))


def by_xla(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> NamedArrays:
    results = (xla.backward if spec.is_backward else xla.forward)(spec, CPU, operands)
    return dict(zip(spec.result_names, results, strict=True))


def results_by_xla(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> NamedArrays:
    """The results of a call by XLA, in one compiled program."""
    return jax.jit(partial(by_xla, spec))(dict(operands))


def chain_results(chain: Chain, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """The results of a chain of rewrites around NumPy's kernel, in one compiled program."""
    return jax.jit(lambda given: chain.compute(given, kernel, by_xla))(dict(operands))


def specs_of(case: Case, *, needs_keep: bool) -> list[AttentionSpec]:
    """The forward call and, if there are gradients, the backward call."""
    forward = spec_of(case.forward_options(needs_keep=needs_keep), case.avals())
    if not case.gradients:
        return [forward]
    return [forward, forward.backward(case.backward_options(case.gradients))]
