"""Comparing the results of two engines: rounding passes, other numbers do not."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from attn_dispatch.core.tuning.numbers import differing
from attn_dispatch.inspection import spec_of
from tests.support.tuning_toy import Q


def test_results_that_differ_beyond_rounding_are_named():
    q = Q.astype(jnp.bfloat16)
    spec = spec_of(query=q, key=q, value=q, return_lse=True)
    rng = np.random.default_rng(1)
    out = jnp.asarray(rng.normal(size=(2, 512, 4, 16)), jnp.bfloat16)
    lse = jnp.asarray(rng.normal(size=(2, 4, 512)), jnp.float32).at[0, 0, 0].set(-jnp.inf)
    noise = 1 + jnp.asarray(rng.normal(size=out.shape) * 2**-8)
    rounded = (out * noise).astype(jnp.bfloat16)
    assert differing(spec, (rounded, lse + 1e-5), (out, lse)) == ()
    assert differing(spec, (out.at[1, 3].multiply(1.1), lse), (out, lse)) == ("out",)
    assert differing(spec, (out.at[1, 3, 1, 2].set(jnp.nan), lse), (out, lse)) == ("out",)
    assert differing(spec, (out, lse.at[0, 0, 1].add(0.01)), (out, lse)) == ("lse",)
    assert differing(spec, (out, lse.at[0, 0, 0].set(0)), (out, lse)) == ("lse",)
    with_nan = out.at[0, 0].set(jnp.nan)
    assert differing(spec, (with_nan, lse), (with_nan, lse)) == ()
