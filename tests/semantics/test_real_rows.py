"""RealRows: queries that attend to some key, and keys in some segment, against dense masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attn_dispatch.semantics.real_rows import RealRows, each_query_attends
from attn_dispatch_tools.verify.case import Case, spec_of
from attn_dispatch_tools.verify.reference import allowed, segment_ids
from tests.support.small_cases import CASES

SEGMENTS = [
    replace(case, name=f"{case.name}_up_to_{largest}", max_segments=largest)
    for case in CASES
    if case.q_segments is not None and case.window_arrays is None
    for largest in (5, 2)  # ids above it are padding
]
# RealRows leaves out array windows, which no kernel supports.
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
def test_real_rows_agree_with_the_dense_mask(case: Case):
    operands: dict[str, Any] = case.operands()
    options = case.forward_options()
    real = RealRows.of(spec_of(options, operands), {x: jnp.asarray(y) for x, y in operands.items()})
    attends = allowed(options, operands)
    is_sure = each_query_attends(spec_of(options, operands))
    if "bias" in operands:
        attends = attends & (operands["bias"] != -np.inf)
    queries = attends.any(axis=3)
    assert queries.all() or not is_sure
    got = True if real.queries is None else np.asarray(real.queries)
    assert (np.broadcast_to(got, queries.shape) == queries).all()
    ids = [segment_ids(options, operands, row) for row in range(case.b)]
    keys = np.array([(key_ids > 0) & np.isin(key_ids, query_ids) for query_ids, key_ids in ids])
    assert keys.all() if real.keys is None else (np.asarray(real.keys) == keys).all()


def test_known_cases_cover_most_kinds_of_calls():
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
def test_each_query_attends_is_true_only_where_certain(case: Case, is_sure: bool):
    operands: dict[str, Any] = case.operands()
    assert each_query_attends(spec_of(case.forward_options(), operands)) == is_sure


def test_row_with_nan_bias_is_real():
    """The result has to show the NaN, and rows that are not real become 0."""
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
