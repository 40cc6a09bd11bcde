"""Cases that limit which pairs attend: alignment, windows, lengths, masks, packed documents."""

from __future__ import annotations

from itertools import product

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.sizes import (
    BOTTOM_RIGHT,
    CAUSAL,
    EIGHTY,
    FOUR,
    HALF_TILE,
    MLA,
    MORE_KEYS,
    MORE_QUERIES,
    ODD,
    ONE_QUERY,
    SIX,
    SMALL,
    SQUARE,
    SQUARE_D128,
    SQUARE_F16,
    Facts,
    Packed,
    Ragged,
    table,
    table_in_turn,
)

_D256 = {"t": 128, "s": 128, "dtype": "bfloat16", "h": 256, "n": 2}
_D96 = {"t": 256, "s": 192, "dtype": "float16", "h": 96}

PLAIN: tuple[Case, ...] = table(
    "plain",
    {"full": {}, "causal": CAUSAL, "bottom_right": BOTTOM_RIGHT},
    (*SIX, SQUARE_F16, SQUARE_D128, ONE_QUERY, MLA, EIGHTY, _D256, _D96),
)

_RIGHT_ALIGNED = {"alignment": "bottom_right"}

WINDOWS: tuple[Case, ...] = (
    *table(
        "window",
        {
            "left": {"window": (40, None)},
            "left_causal": {"window": (70, None), **CAUSAL},
            "left_bottom_right": {"window": (70, None), **BOTTOM_RIGHT},
            "both": {"window": (50, 20)},
            "both_bottom_right": {"window": (50, 20), **_RIGHT_ALIGNED},
        },
        FOUR,
    ),
    *table(
        "window",
        {
            "right": {"window": (None, 30)},
            "left_0_causal": {"window": (0, None), **CAUSAL},
            "both_0": {"window": (0, 0)},
            "both_causal": {"window": (128, 64), **CAUSAL},
            "both_causal_bottom_right": {"window": (33, 1), **BOTTOM_RIGHT},
            "right_bottom_right": {"window": (None, 5), **_RIGHT_ALIGNED},
            "left_open_bottom_right": {"window": (64, None), **_RIGHT_ALIGNED},
            "wider_than_all": {"window": (2**40, None), **CAUSAL},
        },
        (SQUARE, MORE_QUERIES),
    ),
    *table("window", {"left_causal": {"window": (8, None), **CAUSAL}}, (SMALL, ODD, MLA, EIGHTY)),
    # The backward passes of these run rewritten to one diagonal: core/rewrites/one_diagonal.py.
    *table(
        "window",
        {
            "narrow_bottom_right": {"window": (32, None), **BOTTOM_RIGHT},
            "narrow_bottom_right_lengths": {
                "window": (32, None),
                "q_lengths": (0.45, 1),
                "kv_lengths": (1, 0.7),
                "lse_grad": True,
                "sinks": 1,
                **BOTTOM_RIGHT,
            },
        },
        ({"t": 512, "s": 1024, "dtype": "bfloat16", "h": 64, "n": 2, "k": 1},),
    ),
)

# The last row is empty, the first is full.
_BOTH = {"q_lengths": (1, 0.45, 0.8, 0), "kv_lengths": (1, 0.7, 0, 0.3)}
_KEY_LENGTHS = {"kv_lengths": (1, 0.37, 0)}
_QUERY_LENGTHS = {"q_lengths": (1, 0.37, 0)}

LENGTHS: tuple[Case, ...] = (
    *table(
        "lengths",
        {
            "full": _BOTH,
            "causal": _BOTH | CAUSAL,
            "bottom_right": _BOTH | BOTTOM_RIGHT,
            "of_keys": _KEY_LENGTHS,
            "of_keys_causal": _KEY_LENGTHS | CAUSAL,
        },
        FOUR,
    ),
    *table_in_turn(
        "lengths",
        {
            "of_keys_bottom_right": _KEY_LENGTHS | BOTTOM_RIGHT,
            "of_queries": _QUERY_LENGTHS,
            "of_queries_causal": _QUERY_LENGTHS | CAUSAL,
            "of_queries_bottom_right": _QUERY_LENGTHS | BOTTOM_RIGHT,
            "window": _BOTH | {"window": (30, None), **CAUSAL},
            "window_bottom_right": _BOTH | {"window": (30, 10), **_RIGHT_ALIGNED},
            "all_full": {"q_lengths": (1, 1), "kv_lengths": (1, 1)},
            "all_full_bottom_right": {"q_lengths": (1, 1), "kv_lengths": (1, 1), **BOTTOM_RIGHT},
            "all_empty": {"q_lengths": (0, 0), "kv_lengths": (0, 0), **CAUSAL},
            "one_key": {"kv_lengths": (0.004, 1), **CAUSAL},
        },
        (SQUARE, MORE_KEYS, MORE_QUERIES),
    ),
    *table("lengths", {"full": _BOTH, "causal": _BOTH | CAUSAL}, (SMALL, ODD, MLA)),
)

_SHAPES = ["".join(x) for x in product("1b", "1n", "1t", "1s")]

MASKS: tuple[Case, ...] = (
    *table("mask", {f"of_{shape}": {"mask": shape} for shape in _SHAPES[1:]}, (SQUARE,)),
    *table(
        "mask",
        {
            "dead_rows": {"mask": "bnts", "dead_rows": True},
            "dead_rows_shared": {"mask": "11ts", "dead_rows": True, **CAUSAL},
            "dead_queries": {"mask": "b1t1", "dead_rows": True},
            "causal": {"mask": "b11s", **CAUSAL},
            "bottom_right": {"mask": "11ts", **BOTTOM_RIGHT},
        },
        FOUR,
    ),
    *table(
        "mask",
        {
            "lengths": {"mask": "11ts", **_KEY_LENGTHS},
            "window": {"mask": "b1ts", "window": (60, None), **CAUSAL},
            "bias": {"mask": "b11s", "bias": "1nts", **CAUSAL},
        },
        (SQUARE, MORE_KEYS),
    ),
)

_DOCUMENTS = Packed((((1, 0.4), (2, 0.25), (3, 0.35)), ((1, 0.1), (2, 0.6), (3, 0.3))))
# Padding before, between and after documents; id 3 is missing in one row, and short in the other.
_GAPS = Packed(
    (
        ((0, 0.03), (1, 0.27), (0, 0.05), (2, 0.25), (4, 0.3)),
        ((1, 0.52), (2, 0.02), (3, 0.01), (4, 0.2)),
    )
)
# Documents that have only queries or only keys, and a batch row whose queries are all padding.
_CROSS = Packed(
    (((1, 0.3), (2, 0.2), (4, 0.45)), ((0, 1),), ((1, 0.5), (3, 0.5))),
    (((1, 0.5), (3, 0.2), (4, 0.25)), ((1, 1),), ((1, 0.2), (2, 0.3), (3, 0.4))),
)
# Rows of ids above max_segments are NaN.
_ABOVE = Packed((((1, 0.3), (2, 0.3), (3, 0.2), (7, 0.2)), ((2, 0.5), (5, 0.5))))
_ONE_EACH = Packed((((1, 0.9),), ((1, 0.4),), ((1, 1),)))


def _segments(packed: Packed) -> Facts:
    return {"packed": packed, "max_segments": 4}


PACKED: tuple[Case, ...] = (
    *table(
        "packed",
        {
            "documents": _segments(_DOCUMENTS),
            "documents_causal": {**_segments(_DOCUMENTS), **CAUSAL},
            "gaps": _segments(_GAPS),
            "gaps_causal": {**_segments(_GAPS), **CAUSAL},
        },
        (SQUARE, SQUARE_F16, HALF_TILE, MORE_QUERIES),
    ),
    *table(
        "packed",
        {
            "cross": _segments(_CROSS),
            "cross_causal": {**_segments(_CROSS), **CAUSAL},
            "cross_bottom_right": {**_segments(_CROSS), **BOTTOM_RIGHT},
            "cross_window": {**_segments(_CROSS), "window": (20, None), **CAUSAL},
            "cross_window_bottom_right": {
                **_segments(_CROSS),
                "window": (20, 4),
                **_RIGHT_ALIGNED,
            },
        },
        (MORE_KEYS, MORE_QUERIES, SQUARE),
    ),
    *table_in_turn(
        "packed",
        {
            "above_max_causal": {**_segments(_ABOVE), **CAUSAL},
            "gaps_bottom_right": {**_segments(_GAPS), **BOTTOM_RIGHT},
            "gaps_window": {**_segments(_GAPS), "window": (17, None), **CAUSAL},
            "one_each": {**_segments(_ONE_EACH), **CAUSAL},
            "no_groups": {**_segments(_GAPS), "k": 4, **CAUSAL},
            "one_kv_head": {**_segments(_GAPS), "k": 1, **CAUSAL},
            "lse_grad": {**_segments(_GAPS), "lse_grad": True, **CAUSAL},
            "deterministic": {**_segments(_GAPS), "deterministic": True, **CAUSAL},
            "sinks": {**_segments(_GAPS), "sinks": 1, **CAUSAL},
            "soft_cap": {**_segments(_DOCUMENTS), "soft_cap": 5.0, **CAUSAL},
            "alibi": {**_segments(_GAPS), "alibi": 1, **CAUSAL},
            "dropout": {**_segments(_GAPS), "dropout": 0.2, **CAUSAL},
            "row_max": {**_segments(_GAPS), "needs_max": True, **CAUSAL},
            "negative_scores": {**_segments(_GAPS), "score_shift": -200.0, **CAUSAL},
        },
        (SQUARE, HALF_TILE, MORE_QUERIES),
    ),
    *table(
        "packed",
        {
            # Without max_segments the ids may be of any size and order.
            "any_number": {"packed": _GAPS, **CAUSAL},
            "any_number_cross": {"packed": _CROSS, **BOTTOM_RIGHT},
        },
        (SQUARE, MORE_KEYS),
    ),
    *table("packed", {"gaps_causal": {**_segments(_GAPS), **CAUSAL}}, (MLA, EIGHTY, ODD)),
)

# Sequences without queries, without keys or with very few rows, and rows after the last sequence.
_ONE_ROW = Ragged(((0.2, 0, 0.35, 0.01, 0.4),), ((0.3, 0.1, 0.25, 0, 0.3),))
_TWO_ROWS = Ragged(((0.5, 0.5, 0), (0, 0.3, 0.6)), ((0.4, 0.6, 0), (0.2, 0.1, 0.65)))
_WHOLE = Ragged(((0.5, 0.25, 0.25),), ((0.5, 0.25, 0.25),))

RAGGED: tuple[Case, ...] = (
    *table(
        "ragged",
        {
            "one_row": {"packed": _ONE_ROW},
            "one_row_causal": {"packed": _ONE_ROW, **CAUSAL},
            "one_row_bottom_right": {"packed": _ONE_ROW, **BOTTOM_RIGHT},
        },
        FOUR,
    ),
    *table_in_turn(
        "ragged",
        {
            "whole_causal": {"packed": _WHOLE, **CAUSAL},
            "two_rows": {"packed": _TWO_ROWS},
            "two_rows_causal": {"packed": _TWO_ROWS, **CAUSAL},
            "window": {"packed": _ONE_ROW, "window": (25, None), **CAUSAL},
            "window_bottom_right": {"packed": _ONE_ROW, "window": (25, 3), **_RIGHT_ALIGNED},
            "no_groups": {"packed": _ONE_ROW, "k": 4, **CAUSAL},
            "one_kv_head": {"packed": _ONE_ROW, "k": 1},
            "lse_grad": {"packed": _ONE_ROW, "lse_grad": True, **CAUSAL},
            "deterministic": {"packed": _ONE_ROW, "deterministic": True, **CAUSAL},
            "sinks": {"packed": _ONE_ROW, "sinks": 1, **CAUSAL},
            "soft_cap": {"packed": _ONE_ROW, "soft_cap": 5.0},
            "alibi": {"packed": _ONE_ROW, "alibi": 1, **CAUSAL},
            "dropout": {"packed": _ONE_ROW, "dropout": 0.2, **CAUSAL},
        },
        (SQUARE, HALF_TILE, MORE_QUERIES),
    ),
    *table("ragged", {"one_row_causal": {"packed": _ONE_ROW, **CAUSAL}}, (ODD, MLA, EIGHTY)),
)
