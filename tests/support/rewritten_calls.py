"""Rewrites of calls with a cache, computed with a stand-in for the kernel, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_dispatch.core.rewrites.rewrite import Calls
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.in_pages import in_pages, paged_options
from attn_dispatch_tools.verify.reference import poison_padding
from tests.support.kernel_stand_ins import by_xla, results_by_xla


def rewrite_results(
    rewrite: Any, case: Case, compute: Any, *, is_compiled: bool = False
) -> tuple[Any, Any] | None:
    """A rewrite's results with `compute` as the kernel, and XLA's results of the call itself.

    None if the rewrite does not apply. Each of the two is one program if `is_compiled`. That is
    faster, except for cases of the same shapes: JAX keeps the operations that it compiled for them.
    """
    options = case.forward_options()
    arrays = poison_padding(options, case.operands(), case.poison)
    operands = {name: jnp.asarray(x) for name, x in arrays.items()}
    whole = spec_of(options, operands), operands
    if case.page:
        options = paged_options(case, options)
        operands = jax.jit(partial(in_pages, case))(operands)
    spec = spec_of(options, operands)
    if (inner := rewrite.applied(spec)) is None:
        return None
    calls = Calls(partial(compute, inner), by_xla, compute)
    if not is_compiled:
        return rewrite.compute(spec, inner, operands, calls), by_xla(*whole)
    found = jax.jit(lambda given: rewrite.compute(spec, inner, given, calls))(operands)
    return found, results_by_xla(*whole)


def differ(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether results differ by more than rounding to 16 bits."""
    for name, x in found.items():
        x, y = (np.asarray(z, np.float32) for z in (x, expected[name]))
        if not ((x == -np.inf) == (y == -np.inf)).all():
            return True
        if not np.allclose(x, y, atol=0.02, rtol=0.01, equal_nan=True):
            return True
    return False
