"""Drawn custom calls of AITER are refused with a sentence, or stay inside their buffers."""

from __future__ import annotations

import numpy as np

from attn_dispatch import aiter
from tests.fuzz import aiter_calls
from tests.fuzz.child import DRAWS, outcomes


def test_a_16_bit_accumulator_needs_a_head_dim_that_fits_its_rows():
    """A row has 128 columns, or 192 for head dim 192."""
    shapes = (2, 64, 4), (2, 4, 64)
    attributes = {
        "arch": "gfx950", "generation": "dev18", "max_seq_len_q": 64, "max_seq_len_kv": 64,
        "has_gaps": False,
        "scale": 0.125, "logits_soft_cap": 0.0, "dropout_rate": 0.0, "mask": "none",
        "window_left": -1, "window_right": -1, "bias": "none", "use_asm": True,
        "bf16_rounding": 0, "needs_lse": False, "accumulator": "atomic_16",
        "deterministic": False, "has_dbias": False, "is_paged": False, "heads_first_kv": False,
        "value_page": 0, "num_splits": 1,
    }  # fmt: skip
    half, full = np.dtype(np.float16), np.dtype(np.float32)
    for dim in range(8, 257, 8):
        rows, per_row = ((*shapes[0], dim), half), (shapes[1], full)
        dq_acc = ((*shapes[1], 192 if dim == 192 else 128), half)
        call = aiter_calls.Drawn(
            aiter.BACKWARD_TARGET, attributes, (*[rows] * 4, per_row, rows),
            (*[rows] * 3, per_row, dq_acc),
        )  # fmt: skip
        sentence, struct = aiter_calls._prepared(call)
        if dim > 128 and dim != 192:
            expected = "head dim of q: expected at most 128, or 192, with accumulator atomic_16"
            assert sentence == f"{expected}, got {dim}"
        else:
            assert not sentence
            aiter_calls._check_inside(call, struct)


def test_drawn_calls_are_refused_or_stay_inside_their_buffers():
    aiter_calls.write_real_calls()
    counts = outcomes("tests.fuzz.aiter_calls", range(DRAWS or 250))
    assert counts["ran"] >= 25
    assert counts["prepared, too large to run"] >= 1
    assert sum(x.startswith("refused: ") for x in counts) >= 15, counts
