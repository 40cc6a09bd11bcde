"""The arrays of cuDNN's custom calls, for every variant of a call, with NumPy as cuDNN.

A GPU runs the first variant that cuDNN plans; here every variant must give the right results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attn_dispatch.call.operands import is_mod_operand
from attn_dispatch.cudnn import arrays as cudnn_arrays
from attn_dispatch.cudnn import rules as cudnn_rules
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.reference import poison_padding, reference
from tests.support.comparing import check, poisoned, to_jax
from tests.support.cudnn_in_numpy import keep_mask, names_of, run
from tests.support.kernel_stand_ins import kernel_reasons
from tests.support.option_parts import with_facts
from tests.support.small_cases import SMALL

ROWS_FIRST = [
    case for case in SMALL if not kernel_reasons(spec_of(case.forward_options(), case.avals()))
]
LAYOUTS = ("q kv", "q", "kv")
OTHER_LAYOUTS = [
    replace(case, heads_first=LAYOUTS[i % len(LAYOUTS)]) for i, case in enumerate(ROWS_FIRST)
]
ALL_CASES = [*ROWS_FIRST, *OTHER_LAYOUTS]


def case_id(case: Case) -> str:
    return " ".join([case.name, case.heads_first]).strip()


def shapes_of(arrays: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in arrays.items()}


@pytest.mark.parametrize("case", ALL_CASES, ids=case_id)
def test_every_variant_gives_the_reference_results(case: Case):
    operands, drops = case.operands(), case.dropout > 0
    spec = spec_of(case.forward_options(needs_keep=drops), operands)
    assert not kernel_reasons(spec)
    arrays = to_jax(poison_padding(spec.options, operands))
    for call in variants_of(spec):
        if cudnn_rules.variant_reason(call, "sm90"):
            continue
        done = run(call, cudnn_arrays.forward_operands(spec, call, arrays))
        assert shapes_of(done) == shapes_of(cudnn_arrays.forward_shapes(call))
        results = cudnn_arrays.forward_results(spec, call, arrays, to_jax(done))
        keep = np.asarray(results[spec.result_names.index("keep")]) if drops else None
        check(spec, results, reference(spec.options, operands, keep))


@pytest.mark.parametrize("case", ALL_CASES, ids=case_id)
def test_every_variant_gives_the_reference_gradients(case: Case):
    """cuDNN refuses the gradients of ALiBi's slopes and of a bias that is the same for all keys."""
    operands, options = case.operands() | case.cotangents(), case.backward_options()
    residuals = reference(case.forward_options(), case.operands())
    operands |= {name: residuals[name].astype(np.float32) for name in ("out", "lse")}
    wanted = [x for x in options.wanted.gradients if x != "alibi_slopes" and not is_mod_operand(x)]
    wanted = [x for x in wanted if x != "bias" or operands["bias"].shape[3] > 1 or case.s == 1]
    spec = spec_of(with_facts(options, gradients=tuple(wanted)), operands)
    assert not kernel_reasons(spec)
    for call in variants_of(spec):
        if cudnn_rules.variant_reason(call, "sm90"):
            continue
        arrays, keep = poisoned(spec, operands), None
        custom = cudnn_arrays.backward_operands(spec, call, to_jax(arrays))
        if case.dropout:
            mask = keep_mask(call, np.asarray(custom[names_of(call).index("seed")]))
            keep = np.ones((case.b, case.n, case.t, case.s), bool)
            rows = min(case.t, mask.shape[2])  # rows that are cut off have no keys
            keep[:, :, case.t - rows :] = mask[:, :, :rows]
            dropped = reference(case.forward_options(), case.operands(), keep)
            arrays = poisoned(spec, operands | {"out": dropped["out"].astype(np.float32)})
            custom = cudnn_arrays.backward_operands(spec, call, to_jax(arrays))
        done = run(call, custom)
        assert shapes_of(done) == shapes_of(cudnn_arrays.backward_shapes(call))
        results = cudnn_arrays.backward_results(spec, call, to_jax(arrays), to_jax(done))
        check(spec, results, reference(spec.options, operands, keep))
