"""Computation of a call without a GPU: NumPy in cuDNN's place, by cuDNN's rules, and XLA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from attn_dispatch import xla
from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.cudnn import arrays as cudnn_arrays
from attn_dispatch.cudnn import rules as cudnn_rules
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.devices.target import CPU
from attn_dispatch.reason import Reason
from attn_dispatch_tools.verify.case import Case, spec_of
from tests.support.comparing import to_jax
from tests.support.cudnn_in_numpy import run

NamedArrays = dict[str, Any]


def kernel_reasons(spec: AttentionSpec) -> list[Reason]:
    """cuDNN's reasons against a call, except the dtype: float32 can be compared closely."""
    found = cudnn_rules.not_supported_reasons(spec)
    return [reason for reason in found if reason.rule != "dtype"]


def kernel(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> NamedArrays:
    """The results of a call by NumPy, as the first of cuDNN's variants of it."""
    call = variants_of(spec)[0]
    if spec.is_backward:
        done = run(call, cudnn_arrays.backward_operands(spec, call, operands))
        results = cudnn_arrays.backward_results(spec, call, operands, to_jax(done))
    else:
        done = run(call, cudnn_arrays.forward_operands(spec, call, operands))
        results = cudnn_arrays.forward_results(spec, call, operands, to_jax(done))
    return dict(zip(spec.result_names, results, strict=True))


def by_xla(spec: AttentionSpec, operands: Mapping[str, jax.Array]) -> NamedArrays:
    results = (xla.backward if spec.is_backward else xla.forward)(spec, CPU, operands)
    return dict(zip(spec.result_names, results, strict=True))


def specs_of(case: Case, *, needs_keep: bool) -> list[AttentionSpec]:
    """The forward call and, if there are gradients, the backward call."""
    forward = spec_of(case.forward_options(needs_keep=needs_keep), case.avals())
    if not case.gradients:
        return [forward]
    return [forward, forward.backward(case.backward_options(case.gradients))]
