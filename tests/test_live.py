"""Rows that attend to some key, against every pair written out."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.conformance.case import Case, spec_of
from attn_dispatch.conformance.reference import allowed
from attn_dispatch.conformance.small_cases import CASES
from attn_dispatch.live import Live

KNOWN = [
    case for case in CASES if case.q_segments is None or case.max_segments is not None
]  # fmt: skip


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_live_rows(case: Case):
    operands: dict[str, Any] = case.operands()
    options = case.forward_options()
    live = Live.of(spec_of(options, operands), {x: jnp.asarray(y) for x, y in operands.items()})
    may = allowed(options, operands)
    if "bias" in operands:
        may = may & (operands["bias"] != -np.inf)
    queries = may.any(axis=3)
    got = True if live.queries is None else np.asarray(live.queries)
    assert (np.broadcast_to(got, queries.shape) == queries).all()
    if live.keys is not None:
        # A key that some query attends is live; what is not live is attended by none.
        assert not may.any(axis=(1, 2))[~np.asarray(live.keys)].any()


def test_most_kinds_are_looked_at():
    assert len(KNOWN) > 50
    assert any(case.cu_q is not None for case in KNOWN)
    assert any(case.q_lengths is not None for case in KNOWN)
