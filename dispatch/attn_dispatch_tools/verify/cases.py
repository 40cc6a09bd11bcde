"""The table of cases, the same for every implementation."""

from __future__ import annotations

from itertools import chain, product

from attn_dispatch_tools.verify.cache_cases import CACHE
from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.found_cases import FOUND
from attn_dispatch_tools.verify.layout_cases import reordered
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
    Block,
    Facts,
    Packed,
    Ragged,
    case,
)
from attn_dispatch_tools.verify.wide_cases import WIDE_HEADS

# fmt: off
_NEGATIVE: Facts = {"score_shift": -200.0}
_HALF: Facts = {"t": 192, "s": 192}
_SHAPES: dict[str, Facts] = {
    **{
        f"{dtype}_d{h}_{mask}": {"h": h, "dtype": dtype, "t": 384, "s": 384, **options}
        for dtype in ("float16", "bfloat16")
        for h in (64, 128, 256)
        for mask, options in (("full", {}), ("causal", CAUSAL))
    },
    **{f"padded_d{h}": {"h": h, **CAUSAL} for h in (3, 8, 20, 40, 60, 72, 80, 96, 100, 192)},
    "value_narrower": {"h": 192, "v": 128, **CAUSAL},
    "value_half": {"h": 128, "v": 64},
    "value_wider": {"h": 64, "v": 128, **CAUSAL},
    "value_odd": {"h": 50, "v": 30},
    "no_groups": {"k": 8, **CAUSAL},
    "one_kv_head": {"k": 1, **CAUSAL},
    "smollm2_heads": {"n": 9, "k": 3, **CAUSAL},
    "seven_heads": {"n": 7, "k": 7},
    "batch_of_five": {"b": 5, "t": 128, "s": 128},
    "cross_full": {"t": 256, "s": 512},
    "cross_causal": {"t": 256, "s": 512, **CAUSAL},
    "cross_bottom_right": {"t": 256, "s": 512, **BOTTOM_RIGHT},
    "cross_bottom_right_odd": {"t": 100, "s": 333, **BOTTOM_RIGHT},
    "more_queries_full": {"t": 512, "s": 256},
    "more_queries_causal": {"t": 512, "s": 256, **CAUSAL},
    "more_queries_bottom_right": {"t": 512, "s": 256, **BOTTOM_RIGHT},
    "equal_bottom_right": BOTTOM_RIGHT,
    "decode": {"t": 1, "s": 512},
    "decode_bottom_right": {"t": 1, "s": 500, **BOTTOM_RIGHT},
    "one_key": {"t": 256, "s": 1},
    "short_odd": {"t": 33, "s": 17},
    "long_odd": {"b": 1, "n": 4, "t": 1000, "s": 777},
    "odd_causal": {"b": 1, "n": 4, "t": 777, "s": 777, **CAUSAL},
    # Some of cuDNN's bugs occur only at key lengths of 64 modulo 128, or at one query:
    # known_bad.cc.
    "half_tile_full": _HALF,
    "half_tile_causal": {**_HALF, **CAUSAL},
    "half_tile_small": {"t": 64, "s": 64},
    "large_scores": {"magnitude": 12.0},
    "large_scores_f16": {"magnitude": 8.0, "dtype": "float16", **CAUSAL},
    "negative_scores": _NEGATIVE,
    "negative_scores_causal": {**_NEGATIVE, **CAUSAL},
    "negative_scores_half_tile": {**_HALF, **_NEGATIVE},
    "negative_scores_half_tile_causal": {**_HALF, **_NEGATIVE, **CAUSAL},
    "negative_scores_half_tile_more_queries": {"t": 256, "s": 192, **_NEGATIVE, **CAUSAL},
    "negative_scores_half_tile_cross": {"t": 100, "s": 320, **_NEGATIVE, **BOTTOM_RIGHT},
    "negative_scores_decode": {"t": 1, "s": 128, "n": 2, "k": 2, **_NEGATIVE},
    "negative_scores_odd": {"b": 1, "t": 200, "s": 777, **_NEGATIVE},
    "everything_one": {"b": 1, "t": 1, "s": 128, "n": 1, "k": 1},
}
KERNEL_CASES: tuple[Case, ...] = tuple(
    case(f"shapes/{name}", **{"n": 8, **facts}) for name, facts in _SHAPES.items()
)

_D256: Facts = {"t": 128, "s": 128, "dtype": "bfloat16", "h": 256, "n": 2}
_D96: Facts = {"t": 256, "s": 192, "dtype": "float16", "h": 96}
_LONG: Facts = {"t": 512, "s": 1024, "dtype": "bfloat16", "h": 64, "n": 2, "k": 1}
_B4: Facts = {"b": 4, "t": 128, "s": 192, "dtype": "bfloat16", "h": 64}
_WITH_MORE_KEYS = (SQUARE, HALF_TILE, MORE_KEYS)
_WITH_FEWER_KEYS = (SQUARE, HALF_TILE, MORE_QUERIES)

_ALL: Facts = {}
_RIGHT: Facts = {"alignment": "bottom_right"}
_WINDOW: Facts = {"window": (60, None), **CAUSAL}
_KEY_LENGTHS: Facts = {"kv_lengths": (1, 0.37, 0)}
_QUERY_LENGTHS: Facts = {"q_lengths": (1, 0.37, 0)}
_LENGTHS: Facts = {"q_lengths": (1, 0.45, 0), "kv_lengths": (1, 0.7, 0.3)}
# The last row is empty, the first is full.
_BOTH: Facts = {"q_lengths": (1, 0.45, 0.8, 0), "kv_lengths": (1, 0.7, 0, 0.3)}
_DEAD: Facts = {"mask": "11ts", "dead_rows": True}
_BROADCAST = ["".join(x) for x in product("1b", "1n", "1t", "1s")]

_DOCUMENTS = Packed((((1, 0.4), (2, 0.25), (3, 0.35)), ((1, 0.1), (2, 0.6), (3, 0.3)))).most(4)
# Padding before, between and after documents; id 3 is missing in one row, and short in the other.
_GAPS = Packed((
    ((0, 0.03), (1, 0.27), (0, 0.05), (2, 0.25), (4, 0.3)),
    ((1, 0.52), (2, 0.02), (3, 0.01), (4, 0.2)),
)).most(4)
# Documents that have only queries or only keys, and a batch row whose queries are all padding.
_CROSS = Packed(
    (((1, 0.3), (2, 0.2), (4, 0.45)), ((0, 1),), ((1, 0.5), (3, 0.5))),
    (((1, 0.5), (3, 0.2), (4, 0.25)), ((1, 1),), ((1, 0.2), (2, 0.3), (3, 0.4))),
).most(4)
# Block of ids above max_segments are NaN.
_ABOVE = Packed((((1, 0.3), (2, 0.3), (3, 0.2), (7, 0.2)), ((2, 0.5), (5, 0.5)))).most(4)
_ONE_EACH = Packed((((1, 0.9),), ((1, 0.4),), ((1, 1),))).most(4)
# Without max_segments the ids may be of any size and order.
_ANY_GAPS, _ANY_CROSS = ({"packed": x["packed"]} for x in (_GAPS, _CROSS))
_TWO_PACKED = (((1, 0.4), (2, 0.3), (4, 0.2)), ((1, 0.1), (3, 0.8)))
_PACKED: Facts = {**Packed(_TWO_PACKED).most(4), **CAUSAL}

# Sequences without queries, without keys or with very few rows, and rows after the last sequence.
_ONE_ROW: Facts = {"packed": Ragged(((0.2, 0, 0.35, 0.01, 0.4),), ((0.3, 0.1, 0.25, 0, 0.3),))}
_TWO_ROWS: Facts = {
    "packed": Ragged(((0.5, 0.5, 0), (0, 0.3, 0.6)), ((0.4, 0.6, 0), (0.2, 0.1, 0.65))),
}
_WHOLE: Facts = {"packed": Ragged(((0.5, 0.25, 0.25),), ((0.5, 0.25, 0.25),))}
_RAGGED: Facts = {"packed": Ragged(((0.3, 0.1, 0.5),), ((0.4, 0.2, 0.3),)), **CAUSAL}

_SOME_BIASES = ("1nts", "bnts", "11ts", "b1ts", "b11s", "1n1s", "111s", "1nt1")
_SAME: Facts = {"bias_dtype": "same"}
_BIAS: Facts = {"bias": "1nts"}

_MASKED: tuple[tuple[Block, ...], ...] = (
    (
        Block("plain", (*SIX, SQUARE_F16, SQUARE_D128, ONE_QUERY, MLA, EIGHTY, _D256, _D96), {
            "full": _ALL, "causal": CAUSAL, "bottom_right": BOTTOM_RIGHT,
        }),
    ),
    (
        Block("window", FOUR, {
            "left": {"window": (40, None)},
            "left_causal": {"window": (70, None), **CAUSAL},
            "left_bottom_right": {"window": (70, None), **BOTTOM_RIGHT},
            "both": {"window": (50, 20)},
            "both_bottom_right": {"window": (50, 20), **_RIGHT},
        }),
        Block("window", (SQUARE, MORE_QUERIES), {
            "right": {"window": (None, 30)},
            "left_0_causal": {"window": (0, None), **CAUSAL},
            "both_0": {"window": (0, 0)},
            "both_causal": {"window": (128, 64), **CAUSAL},
            "both_causal_bottom_right": {"window": (33, 1), **BOTTOM_RIGHT},
            "right_bottom_right": {"window": (None, 5), **_RIGHT},
            "left_open_bottom_right": {"window": (64, None), **_RIGHT},
            "wider_than_all": {"window": (2**40, None), **CAUSAL},
        }),
        Block("window", (SMALL, ODD, MLA, EIGHTY), {
            "left_causal": {"window": (8, None), **CAUSAL},
        }),
        # The backward passes of these run rewritten to one diagonal:
        # core/rewrites/one_diagonal.py.
        Block("window", (_LONG,), {
            "narrow_bottom_right": _ALL,
            "narrow_bottom_right_lengths": {
                "q_lengths": (0.45, 1), "kv_lengths": (1, 0.7), "lse_grad": True, "sinks": 1,
            },
        }, {"window": (32, None), **BOTTOM_RIGHT}),
    ),
    (
        Block("lengths", FOUR, {
            "full": _BOTH,
            "causal": {**_BOTH, **CAUSAL},
            "bottom_right": {**_BOTH, **BOTTOM_RIGHT},
            "of_keys": _KEY_LENGTHS,
            "of_keys_causal": {**_KEY_LENGTHS, **CAUSAL},
        }),
        Block("lengths", (SQUARE, MORE_KEYS, MORE_QUERIES), {
            "of_keys_bottom_right": {**_KEY_LENGTHS, **BOTTOM_RIGHT},
            "of_queries": _QUERY_LENGTHS,
            "of_queries_causal": {**_QUERY_LENGTHS, **CAUSAL},
            "of_queries_bottom_right": {**_QUERY_LENGTHS, **BOTTOM_RIGHT},
            "window": {**_BOTH, "window": (30, None), **CAUSAL},
            "window_bottom_right": {**_BOTH, "window": (30, 10), **_RIGHT},
            "all_full": {"q_lengths": (1, 1), "kv_lengths": (1, 1)},
            "all_full_bottom_right": {"q_lengths": (1, 1), "kv_lengths": (1, 1), **BOTTOM_RIGHT},
            "all_empty": {"q_lengths": (0, 0), "kv_lengths": (0, 0), **CAUSAL},
            "one_key": {"kv_lengths": (0.004, 1), **CAUSAL},
        }, in_turn=True),
        Block("lengths", (SMALL, ODD, MLA), {"full": _BOTH, "causal": {**_BOTH, **CAUSAL}}),
    ),
    (
        Block("mask", (SQUARE,), {f"of_{shape}": {"mask": shape} for shape in _BROADCAST[1:]}),
        Block("mask", FOUR, {
            "dead_rows": {"mask": "bnts", "dead_rows": True},
            "dead_rows_shared": {**_DEAD, **CAUSAL},
            "dead_queries": {"mask": "b1t1", "dead_rows": True},
            "causal": {"mask": "b11s", **CAUSAL},
            "bottom_right": {"mask": "11ts", **BOTTOM_RIGHT},
        }),
        Block("mask", (SQUARE, MORE_KEYS), {
            "lengths": {"mask": "11ts", **_KEY_LENGTHS},
            "window": {"mask": "b1ts", **_WINDOW},
            "bias": {"mask": "b11s", **_BIAS, **CAUSAL},
        }),
    ),
    (
        Block("packed", (SQUARE, SQUARE_F16, HALF_TILE, MORE_QUERIES), {
            "documents": _DOCUMENTS,
            "documents_causal": {**_DOCUMENTS, **CAUSAL},
            "gaps": _GAPS,
            "gaps_causal": {**_GAPS, **CAUSAL},
        }),
        Block("packed", (MORE_KEYS, MORE_QUERIES, SQUARE), {
            "cross": _ALL,
            "cross_causal": CAUSAL,
            "cross_bottom_right": BOTTOM_RIGHT,
            "cross_window": {"window": (20, None), **CAUSAL},
            "cross_window_bottom_right": {"window": (20, 4), **_RIGHT},
        }, _CROSS),
        Block("packed", _WITH_FEWER_KEYS, {
            "above_max_causal": {**_ABOVE, **CAUSAL},
            "gaps_bottom_right": {**_GAPS, **BOTTOM_RIGHT},
            "gaps_window": {**_GAPS, "window": (17, None), **CAUSAL},
            "one_each": {**_ONE_EACH, **CAUSAL},
            "no_groups": {**_GAPS, "k": 4, **CAUSAL},
            "one_kv_head": {**_GAPS, "k": 1, **CAUSAL},
            "lse_grad": {**_GAPS, "lse_grad": True, **CAUSAL},
            "deterministic": {**_GAPS, "deterministic": True, **CAUSAL},
            "sinks": {**_GAPS, "sinks": 1, **CAUSAL},
            "soft_cap": {**_DOCUMENTS, "soft_cap": 5.0, **CAUSAL},
            "alibi": {**_GAPS, "alibi": 1, **CAUSAL},
            "dropout": {**_GAPS, "dropout": 0.2, **CAUSAL},
            "row_max": {**_GAPS, "needs_max": True, **CAUSAL},
            "negative_scores": {**_GAPS, **_NEGATIVE, **CAUSAL},
        }, in_turn=True),
        Block("packed", (SQUARE, MORE_KEYS), {
            "any_number": {**_ANY_GAPS, **CAUSAL},
            "any_number_cross": {**_ANY_CROSS, **BOTTOM_RIGHT},
        }),
        Block("packed", (MLA, EIGHTY, ODD), {"gaps_causal": {**_GAPS, **CAUSAL}}),
    ),
    (
        Block("ragged", FOUR, {
            "one_row": _ALL, "one_row_causal": CAUSAL, "one_row_bottom_right": BOTTOM_RIGHT,
        }, _ONE_ROW),
        Block("ragged", _WITH_FEWER_KEYS, {
            "whole_causal": {**_WHOLE, **CAUSAL},
            "two_rows": _TWO_ROWS,
            "two_rows_causal": {**_TWO_ROWS, **CAUSAL},
            "window": {"window": (25, None), **CAUSAL},
            "window_bottom_right": {"window": (25, 3), **_RIGHT},
            "no_groups": {"k": 4, **CAUSAL},
            "one_kv_head": {"k": 1},
            "lse_grad": {"lse_grad": True, **CAUSAL},
            "deterministic": {"deterministic": True, **CAUSAL},
            "sinks": {"sinks": 1, **CAUSAL},
            "soft_cap": {"soft_cap": 5.0},
            "alibi": {"alibi": 1, **CAUSAL},
            "dropout": {"dropout": 0.2, **CAUSAL},
        }, _ONE_ROW, in_turn=True),
        Block("ragged", (ODD, MLA, EIGHTY), {"one_row_causal": CAUSAL}, _ONE_ROW),
    ),
)
"""Cases that limit which pairs attend: alignment, windows, lengths, masks, packed documents."""

_SCORED: tuple[tuple[Block, ...], ...] = (
    (
        Block("bias", (SQUARE,), {f"of_{shape}": {"bias": shape} for shape in _BROADCAST}),
        Block("bias", (HALF_TILE,), {
            f"16_bits_of_{shape}": {"bias": shape, **_SAME} for shape in _SOME_BIASES
        }),
        Block("bias", (*FOUR, ODD), {
            "causal": {**_BIAS, **CAUSAL},
            "bottom_right": {**_BIAS, **BOTTOM_RIGHT},
            "lengths": {"bias": "bnts", **_LENGTHS},
            "infinite": {"bias": "bnts", "infinite_bias": True},
        }),
        Block("bias", _WITH_MORE_KEYS, {
            "16_bits_causal": {**_BIAS, **_SAME, **CAUSAL},
            "16_bits_lengths": {"bias": "11ts", **_SAME, **_LENGTHS, **CAUSAL},
            "16_bits_infinite": {"bias": "bnts", **_SAME, "infinite_bias": True, **CAUSAL},
            "window": {**_BIAS, "window": (64, None), **CAUSAL},
            "of_keys_lengths": {"bias": "b11s", "kv_lengths": (1, 0.37, 0.6)},
            "soft_cap": {**_BIAS, "soft_cap": 4.0, **CAUSAL},
            "sinks": {**_BIAS, "sinks": 1, **CAUSAL},
            "alibi": {"bias": "b1ts", "alibi": 1, **CAUSAL},
            "dropout": {**_BIAS, "dropout": 0.25, **CAUSAL},
            "deterministic": {**_BIAS, "deterministic": True, **CAUSAL},
            "lse_grad": {**_BIAS, "lse_grad": True, **CAUSAL},
        }, in_turn=True),
        Block("bias", (SMALL, ONE_QUERY, MLA), {"full": _BIAS}),
    ),
    (
        Block("alibi", (*FOUR, ODD), {
            "causal": CAUSAL, "full": _ALL, "bottom_right": BOTTOM_RIGHT,
        }, {"alibi": 1}),
        Block("alibi", (SQUARE, MORE_QUERIES), {
            "of_batch_causal": {"alibi": 2, **CAUSAL},
            "of_batch_bottom_right": {"alibi": 2, **BOTTOM_RIGHT},
            "full_bottom_right": _RIGHT,
            "lengths": {**_LENGTHS, **CAUSAL},
            "lengths_bottom_right": {**_LENGTHS, **BOTTOM_RIGHT},
            "window": {"window": (90, None), **CAUSAL},
            "lse_grad": {"lse_grad": True, **CAUSAL},
            "dropout": {"dropout": 0.1, **CAUSAL},
        }, {"alibi": 1}),
        Block("alibi", (ONE_QUERY, MLA), {"bottom_right": {"alibi": 1, **BOTTOM_RIGHT}}),
    ),
    (
        Block("soft_cap", (*FOUR, ODD), {"full": _ALL, "causal": CAUSAL}, {"soft_cap": 3.0}),
        Block("soft_cap", (SQUARE, MORE_KEYS), {
            "large_scores": {"soft_cap": 30.0, "magnitude": 6.0, **CAUSAL},
            "bottom_right": BOTTOM_RIGHT,
            "window": _WINDOW,
            "lengths": _LENGTHS,
            "sinks": {"sinks": 1, **CAUSAL},
            "lse_grad": {"lse_grad": True},
            "alibi": {"alibi": 1, **CAUSAL},
        }, {"soft_cap": 3.0}),
        Block("soft_cap", (ONE_QUERY, MLA), {"full": {"soft_cap": 3.0}}),
    ),
    (
        Block("sinks", (*FOUR, ODD), {
            "full": _ALL, "causal": CAUSAL, "window": {"window": (128, None), **CAUSAL},
        }, {"sinks": 1}),
        Block("sinks", _WITH_MORE_KEYS, {
            "of_batch": {"sinks": 2, **CAUSAL},
            "bottom_right": BOTTOM_RIGHT,
            "lengths": {**_LENGTHS, **CAUSAL},
            "mask": _DEAD,
            "lse_grad": {"lse_grad": True, **CAUSAL},
            "dropout": {"dropout": 0.2, **CAUSAL},
            "negative_scores": {"score_shift": -60.0, **CAUSAL},
            "deterministic": {"deterministic": True, **CAUSAL},
        }, {"sinks": 1}, in_turn=True),
        Block("sinks", (ONE_QUERY, MLA), {"causal": {"sinks": 1, **BOTTOM_RIGHT}}),
    ),
    (
        Block("negative", FOUR, {
            "full": _ALL, "causal": CAUSAL, "lengths": _LENGTHS,
            "window": {"window": (70, None), **CAUSAL},
        }, _NEGATIVE),
        Block("negative", (SQUARE, HALF_TILE), {
            "bottom_right": BOTTOM_RIGHT,
            "mask": {"mask": "b11s", **CAUSAL},
            "bias": {**_BIAS, **CAUSAL},
            "soft_cap": {"score_shift": -60.0, "soft_cap": 80.0, **CAUSAL},
        }, _NEGATIVE),
        Block("positive", FOUR, {"full": _ALL, "causal": CAUSAL}, {"score_shift": 200.0}),
        Block("large", FOUR, {"full": _ALL, "causal": CAUSAL}, {"magnitude": 8.0}),
        # SMALL is left out: with few keys the output is large, and with it the rounding error in
        # delta.
        Block("negative", (ONE_QUERY, MLA), {"full": _NEGATIVE}),
    ),
)
"""Cases that change scores: biases, ALiBi, soft caps, sinks, and scores of extreme size."""

_TRANSFORMED: dict[str, Facts] = {
    "causal": CAUSAL,
    "lengths": {"q_lengths": (1, 0.45, 0, 0.8), "kv_lengths": (1, 0.7, 0.3, 0), **CAUSAL},
    "bias": {"bias": "bnts", **CAUSAL},
}
_IN_PARTS: dict[str, Facts] = {
    "packed": {**Packed((*_TWO_PACKED, ((2, 1),), ((0, 0.3), (1, 0.7)))).most(4), **CAUSAL},
    "ragged": {
        "packed": Ragged(
            ((0.3, 0.1, 0.5), (0, 0.5, 0.5), (0.2, 0.2, 0.2), (1, 0, 0)),
            ((0.4, 0.2, 0.3), (0.5, 0.5, 0), (0.1, 0.6, 0.3), (1, 0, 0)),
        ),
    },
    "dropout": {"dropout": 0.2, "dropout_keys": 4, "b": 4, **CAUSAL},
    "shared_sinks": {"sinks": 1, "b": 4, **CAUSAL},
    "shared_mask": {"mask": "1n1s", "b": 4},
}
_TRANSFORMS: dict[str, dict[str, Facts]] = {
    "vmap": _TRANSFORMED | _IN_PARTS, "scan": _TRANSFORMED | _IN_PARTS,
    "checkpoint": _TRANSFORMED, "eager": _TRANSFORMED, "donate": _TRANSFORMED,
}
_ALMOST_ALL: Facts = {"is_causal": True, "window": (100, None), "sinks": 1, "lse_grad": True}

_FURTHER: tuple[tuple[Block, ...], ...] = (
    (
        Block("dropout", FOUR, {
            "tenth": {"dropout": 0.1},
            "causal": {"dropout": 0.3, **CAUSAL},
            "lengths": {"dropout": 0.2, **_LENGTHS},
        }),
        Block("dropout", (SQUARE, MORE_QUERIES), {
            "most": {"dropout": 0.9},
            "bottom_right": BOTTOM_RIGHT,
            "window": _WINDOW,
            "keys_of_rows": {"dropout_keys": 2},
            "rbg": {"dropout_impl": "rbg", **CAUSAL},
            "lse_grad": {"lse_grad": True, **CAUSAL},
            "deterministic": {"deterministic": True, **CAUSAL},
        }, {"dropout": 0.2}),
    ),
    (
        Block("lse_grad", (*FOUR, ODD), {"full": _ALL, "causal": CAUSAL}, {"lse_grad": True}),
        Block("lse_grad", (SQUARE, MORE_QUERIES), {
            "bottom_right": BOTTOM_RIGHT,
            "window": _WINDOW,
            "lengths": _LENGTHS,
            "mask": _DEAD,
            "negative_scores": _NEGATIVE,
            "deterministic": {"deterministic": True, **CAUSAL},
        }, {"lse_grad": True}),
        Block("lse_grad", (SMALL, ONE_QUERY, MLA), {"full": {"lse_grad": True}}),
    ),
    (
        Block("row_max", (*FOUR, ODD), {"full": _ALL, "causal": CAUSAL}, {"needs_max": True}),
        Block("row_max", (SQUARE,), {
            "bottom_right": BOTTOM_RIGHT,
            "window": _WINDOW,
            "lengths": _LENGTHS,
            "bias": {**_BIAS, **CAUSAL},
            "soft_cap": {"soft_cap": 3.0},
            "sinks": {"sinks": 1},
            "alibi": {"alibi": 1, **CAUSAL},
            "mask": _DEAD,
            "negative_scores": _NEGATIVE,
            "lse_grad": {"lse_grad": True, **CAUSAL},
        }, {"needs_max": True}),
        Block("row_max", (ONE_QUERY,), {"full": {"needs_max": True}}),
    ),
    (
        Block("deterministic", (*FOUR, MLA), {
            "full": _ALL, "causal": CAUSAL, "bottom_right": BOTTOM_RIGHT,
        }, {"deterministic": True}),
        Block("deterministic", (SQUARE, MORE_QUERIES), {
            "window": _WINDOW,
            "lengths": {**_LENGTHS, **CAUSAL},
            "ragged": _RAGGED,
            "one_kv_head": {"k": 1, **CAUSAL},
            "no_groups": {"k": 4},
        }, {"deterministic": True}),
    ),
    (
        Block("one_query", (ONE_QUERY,), {
            "lengths": {"kv_lengths": (1, 0.7, 0)},
            "lengths_bottom_right": {"kv_lengths": (1, 0.7, 0), **BOTTOM_RIGHT},
            "window": {"window": (100, None), **BOTTOM_RIGHT},
            "mask": {"mask": "b11s"},
            "no_groups": {"k": 8, **BOTTOM_RIGHT},
            "one_kv_head": {"k": 1},
            "half_tile": {"s": 192},
            "odd": {"s": 333, **BOTTOM_RIGHT},
            "few_keys": {"s": 3},
        }),
    ),
    (
        Block("inference", (SQUARE, HALF_TILE, MORE_QUERIES, ONE_QUERY, MLA), {
            "full": _ALL, "causal": CAUSAL,
        }, {"inference": True}),
        Block("inference", _WITH_MORE_KEYS, {
            "bottom_right": BOTTOM_RIGHT,
            "window": _WINDOW,
            "lengths": _LENGTHS,
            "mask": {"mask": "b1ts"},
            "bias": _BIAS,
            "sinks": {"sinks": 1, **CAUSAL},
            "packed": _PACKED,
            "ragged": _RAGGED,
            "dropout": {"dropout": 0.2},
        }, {"inference": True}, in_turn=True),
        Block("inference", (ONE_QUERY,), {
            "lengths": {"kv_lengths": (1, 0.7, 0), **BOTTOM_RIGHT},
            "soft_cap": {"soft_cap": 3.0},
            "alibi": {"alibi": 1, **BOTTOM_RIGHT},
        }, {"inference": True}),
    ),
    (
        Block("transforms", (_B4,), {
            f"{transform}_{name}": {"transform": transform, **facts}
            for transform, features in _TRANSFORMS.items()
            for name, facts in features.items()
        }),
    ),
    (
        Block("combined", _WITH_MORE_KEYS, {
            "window_sinks_lengths": {**_ALMOST_ALL, **_LENGTHS},
            "window_sinks_bottom_right": {**_ALMOST_ALL, **_RIGHT},
            "bias_mask_lengths": {**_BIAS, "mask": "b11s", **_LENGTHS, **CAUSAL},
            "bias_dropout_max": {**_BIAS, "dropout": 0.2, "needs_max": True, **CAUSAL},
            "soft_cap_window_sinks": {"soft_cap": 10.0, **_WINDOW, "sinks": 1},
            "soft_cap_lengths_bias": {"soft_cap": 10.0, **_BIAS, **_LENGTHS, **CAUSAL},
            "alibi_window_lengths": {"alibi": 1, **_WINDOW, **_LENGTHS},
            "deterministic_window_lengths": {"deterministic": True, **_WINDOW, **_LENGTHS},
            "negative_window_lengths": {**_NEGATIVE, **_WINDOW, **_LENGTHS},
            "dropout_window_lengths": {"dropout": 0.15, **_WINDOW, **_LENGTHS},
            "packed_window_sinks_lse": {
                **_PACKED, "window": (40, None), "sinks": 1, "lse_grad": True,
            },
            "everything": {
                **BOTTOM_RIGHT, "window": (90, None), **_BIAS, "alibi": 1, "sinks": 1,
                "dropout": 0.2, "lse_grad": True, "needs_max": True, "mask": "b11s",
                "soft_cap": 20.0, **_LENGTHS,
            },
        }, in_turn=True),
    ),
)
"""Cases of further results, of transforms of the call, and of many options at once."""
# fmt: on

_TABLES: tuple[tuple[Case, ...], ...] = (
    KERNEL_CASES,
    *(
        tuple(chain.from_iterable(block.cases() for block in group))
        for group in (*_MASKED, *_SCORED, *_FURTHER)
    ),
    CACHE,
)

CASES: tuple[Case, ...] = (
    *chain.from_iterable(_TABLES),
    *reordered(_TABLES),
    *FOUND,
    *WIDE_HEADS,
)
"""All cases, in float16 and bfloat16, at sizes that kernels are made for."""

BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
