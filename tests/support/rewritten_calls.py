"""Rewrites of calls beside a cache, computed with something in the kernel's place, and compared."""

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
from tests.support.in_place_of_kernels import by_xla


def rewritten_alone(rewrite: Any, case: Case, compute: Any) -> tuple[Any, Any] | None:
    """The results of a rewrite with this in the kernel's place, and XLA's of the call itself."""
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
    expected = by_xla(*whole)
    return rewrite.compute(spec, inner, operands, Calls(compute, by_xla, compute)), expected


def are_apart(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether results differ by more than their rounding to 16 bits."""
    for name, x in found.items():
        x, y = (np.asarray(z, np.float32) for z in (x, expected[name]))
        if not ((x == -np.inf) == (y == -np.inf)).all():
            return True
        if not np.allclose(x, y, atol=0.02, rtol=0.01, equal_nan=True):
            return True
    return False
