"""Rows that attend to some key, against every pair written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.semantics.real_rows import RealRows, each_query_attends
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.reference import allowed, segment_ids
from attn_dispatch_tools.verify.small_cases import CASES

SEGMENTS = [
    replace(case, name=f"{case.name}_up_to_{largest}", max_segments=largest)
    for case in CASES
    if case.q_segments is not None and case.window_arrays is None
    for largest in (5, 2)  # ids above it are padding
]
# No kernel is asked about windows that are arrays.
KNOWN = [x for x in CASES if x.q_segments is None and x.window_arrays is None] + SEGMENTS
EDGES = (
    Case("one_query", t=1, window=(0, 0), alignment="bottom_right"),
    Case("window_past_all_keys", t=14, s=3, window=(2, 1)),
    Case("window_before_all_keys", t=14, s=3, window=(None, 1), alignment="bottom_right"),
    Case("window_empty_lengths", b=2, q_lengths=(10, 2), kv_lengths=(2, 0), window=(1, 0)),
    Case("bias_infinite_lengths", b=2, bias=(2, 1, 10, 14), infinite_bias=True, q_lengths=(10, 4)),
    Case("bias_infinite_mask", bias=(1, 4, 10, 14), infinite_bias=True, mask=(2, 1, 10, 14)),
    Case("bias_infinite_window", bias=(2, 4, 10, 14), infinite_bias=True, window=(1, 0)),
)


@pytest.mark.parametrize("case", [*KNOWN, *EDGES], ids=str)
def test_live_rows(case: Case):
    operands: dict[str, Any] = case.operands()
    options = case.forward_options()
    real = RealRows.of(spec_of(options, operands), {x: jnp.asarray(y) for x, y in operands.items()})
    may = allowed(options, operands)
    is_sure = each_query_attends(spec_of(options, operands))
    if "bias" in operands:
        may = may & (operands["bias"] != -np.inf)
    queries = may.any(axis=3)
    assert queries.all() or not is_sure
    got = True if real.queries is None else np.asarray(real.queries)
    assert (np.broadcast_to(got, queries.shape) == queries).all()
    ids = [segment_ids(options, operands, row) for row in range(case.b)]
    keys = np.array([(of_key > 0) & np.isin(of_key, of_query) for of_query, of_key in ids])
    assert keys.all() if real.keys is None else (np.asarray(real.keys) == keys).all()


def test_most_kinds_are_looked_at():
    assert len(KNOWN) > 50 and len(SEGMENTS) >= 8
    assert any(case.cu_q is not None for case in KNOWN)
    assert any(case.q_lengths is not None for case in KNOWN)


@pytest.mark.parametrize(
    ("case", "is_sure"),
    [
        (Case("plain"), True),
        (Case("causal", is_causal=True), True),
        (Case("longer", t=14, s=3, is_causal=True), True),
        (Case("longer", t=14, s=3, is_causal=True, alignment="bottom_right"), False),
        (Case("window", window=(2, 1)), True),
        (Case("window", t=14, s=3, window=(2, 1)), False),
        (Case("lengths", b=2, kv_lengths=(2, 0)), False),
        (Case("bias", bias=(1, 4, 10, 14)), False),
    ],
    ids=str,
)
def test_whether_all_rows_attend_is_known_of_plain_calls(case: Case, is_sure: bool):
    operands: dict[str, Any] = case.operands()
    assert each_query_attends(spec_of(case.forward_options(), operands)) == is_sure


def test_a_row_of_nan_biases_is_live():
    """NaN has to come out, and padding rows become 0."""
    case = Case("bias_nan", bias=(1, 4, 10, 14))
    operands = dict(case.operands())
    bias = np.array(operands["bias"])
    bias[0, 1, 3], bias[0, 2, 4] = np.nan, -np.inf
    operands["bias"] = bias
    real = RealRows.of(
        spec_of(case.forward_options(), operands), {x: jnp.asarray(y) for x, y in operands.items()}
    )
    assert real.queries is not None
    assert np.argwhere(~np.asarray(real.queries)[0]).tolist() == [[2, 4]]
