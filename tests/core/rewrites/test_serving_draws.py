"""Drawn serving calls with the rewrites that cuDNN needs, computed by NumPy as the kernel.

Like cuDNN, the stand-in multiplies by everything in a page, including NaN past a length.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.call.spec import AttentionSpec
from attn_dispatch.core.rewrites import Chain, Terms, preferred, rewritten
from attn_dispatch.cudnn import rules
from attn_dispatch.cudnn.call import variants_of
from attn_dispatch.reason import Reason
from attn_dispatch_tools.verify import draws
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from attn_dispatch_tools.verify.reference import poison_padding
from attn_dispatch_tools.verify.serving_draws import serving_examples
from tests.support.kernel_stand_ins import chain_results, results_by_xla

SIZES = draws.Sizes(
    lengths=(1, 300), head_dims=(16,), value_dims=(8,), heads=((4, 2),), dtypes=("float16",)
)


def reasons_against(spec: AttentionSpec) -> tuple[Reason, ...]:
    if found := rules.not_supported_reasons(spec):
        return found
    variant_reasons = [
        rules.variant_reason(call, "sm90", whole_pages=spec.promises.whole_pages)
        for call in variants_of(spec)
    ]
    first = variant_reasons[0]
    return () if first is None or None in variant_reasons else (first,)


def chain_and_operands(case: Case) -> tuple[Chain, Any, Any]:
    """The chain by which cuDNN runs the case, its operands, and XLA's results with arrays."""
    options = case.forward_options()
    arrays = poison_padding(options, case.operands(), case.poison)
    operands = {name: jnp.asarray(x) for name, x in arrays.items()}
    expected = results_by_xla(spec_of(options, operands), operands)
    if case.page:
        options = paged_options(case, options)
        operands = jax.jit(partial(in_pages, case))(operands)
    spec = spec_of(options, operands)
    preferred_rewrites = preferred(
        spec.options.operands,
        is_backward=spec.is_backward,
        has_decoding_kernel=True,
        skips_from_bottom_right=True,
    )
    return rewritten(spec, Terms(reasons_against, preferred=preferred_rewrites)), operands, expected


def failure(case: Case) -> str:
    chain, operands, expected = chain_and_operands(case)
    if chain.reasons:
        return ""
    first = chain.steps[0][1] if chain.steps else chain.spec
    results = chain_results(chain, operands)
    for name, x in zip(first.result_names, results, strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, expected[name]))
        for is_special in (np.isnan, np.isneginf, np.isposinf):
            if (is_special(x) != is_special(y)).any():
                return f"{name}: other NaN or infinities, by {chain.names}"
        atol = 0.03 * max(1, np.abs(y[np.isfinite(y)]).max(initial=0))
        if not np.allclose(x, y, atol=atol, rtol=0.01, equal_nan=True):
            wrong = np.nanmax(np.abs(np.where(np.isfinite(y), x - y, 0)))
            return f"{name}: off by {wrong:.3g}, by {chain.names}"
    return ""


_DRAWN = [x for x in serving_examples(12, 20261124, SIZES) if not x.ragged]


@pytest.mark.parametrize("case", _DRAWN, ids=str)
def test_drawn_serving_calls_agree_with_xla(case):
    assert not failure(case)
