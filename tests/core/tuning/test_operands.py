"""Operands made for tuning a call that is known by its shapes only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.core.tuning.operands import made_for
from attn_dispatch.inspection import spec_of


@pytest.mark.parametrize("longest", [256, 64, 20])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_made_up_sequences_fit_the_limits(count, longest):
    q = jax.ShapeDtypeStruct((256, 4, 16), jnp.bfloat16)
    cu = jax.ShapeDtypeStruct((count + 1,), jnp.int32)
    spec = spec_of(query=q, key=q, value=q, cu_seqlens_q=cu, cu_seqlens_kv=cu,
                   max_seqlen_q=longest, max_seqlen_kv=longest)  # fmt: skip
    made = made_for(spec)
    lengths = np.diff(made["cu_seqlens_q"][0])
    assert (lengths > 0).all() and lengths.max() <= longest
    assert lengths.sum() == min(256, count * longest)
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    q = jax.ShapeDtypeStruct((2, 256, 4, 16), jnp.bfloat16)
    spec = spec_of(query=q, key=q, value=q, query_segment_ids=ids, max_segments=count)
    made = np.asarray(made_for(spec)["query_segment_ids"])
    assert made.shape == (2, 256) and (np.diff(made) >= 0).all() and made.max() == count
