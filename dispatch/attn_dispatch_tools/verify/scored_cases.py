"""Cases that change scores: biases, ALiBi, soft caps, sinks, and scores of extreme size."""

from __future__ import annotations

from itertools import product

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.sizes import (
    BOTTOM_RIGHT,
    CAUSAL,
    FOUR,
    HALF_TILE,
    MLA,
    MORE_KEYS,
    MORE_QUERIES,
    ODD,
    ONE_QUERY,
    SMALL,
    SQUARE,
    table,
    table_in_turn,
)

_KV_LENGTHS = {"kv_lengths": (1, 0.37, 0.6)}
_LENGTHS = {"q_lengths": (1, 0.45, 0), "kv_lengths": (1, 0.7, 0.3)}
_SHAPES = ["".join(x) for x in product("1b", "1n", "1t", "1s")]
_SOME_SHAPES = ("1nts", "bnts", "11ts", "b1ts", "b11s", "1n1s", "111s", "1nt1")
_SAME = {"bias_dtype": "same"}

BIASES: tuple[Case, ...] = (
    *table("bias", {f"of_{shape}": {"bias": shape} for shape in _SHAPES}, (SQUARE,)),
    *table(
        "bias",
        {f"16_bits_of_{shape}": {"bias": shape, **_SAME} for shape in _SOME_SHAPES},
        (HALF_TILE,),
    ),
    *table(
        "bias",
        {
            "causal": {"bias": "1nts", **CAUSAL},
            "bottom_right": {"bias": "1nts", **BOTTOM_RIGHT},
            "lengths": {"bias": "bnts", **_LENGTHS},
            "infinite": {"bias": "bnts", "infinite_bias": True},
        },
        (*FOUR, ODD),
    ),
    *table_in_turn(
        "bias",
        {
            "16_bits_causal": {"bias": "1nts", **_SAME, **CAUSAL},
            "16_bits_lengths": {"bias": "11ts", **_SAME, **_LENGTHS, **CAUSAL},
            "16_bits_infinite": {"bias": "bnts", **_SAME, "infinite_bias": True, **CAUSAL},
            "window": {"bias": "1nts", "window": (64, None), **CAUSAL},
            "of_keys_lengths": {"bias": "b11s", **_KV_LENGTHS},
            "soft_cap": {"bias": "1nts", "soft_cap": 4.0, **CAUSAL},
            "sinks": {"bias": "1nts", "sinks": 1, **CAUSAL},
            "alibi": {"bias": "b1ts", "alibi": 1, **CAUSAL},
            "dropout": {"bias": "1nts", "dropout": 0.25, **CAUSAL},
            "deterministic": {"bias": "1nts", "deterministic": True, **CAUSAL},
            "lse_grad": {"bias": "1nts", "lse_grad": True, **CAUSAL},
        },
        (SQUARE, HALF_TILE, MORE_KEYS),
    ),
    *table("bias", {"full": {"bias": "1nts"}}, (SMALL, ONE_QUERY, MLA)),
)

ALIBI: tuple[Case, ...] = (
    *table(
        "alibi",
        {
            "causal": {"alibi": 1, **CAUSAL},
            "full": {"alibi": 1},
            "bottom_right": {"alibi": 1, **BOTTOM_RIGHT},
        },
        (*FOUR, ODD),
    ),
    *table(
        "alibi",
        {
            "of_batch_causal": {"alibi": 2, **CAUSAL},
            "of_batch_bottom_right": {"alibi": 2, **BOTTOM_RIGHT},
            "full_bottom_right": {"alibi": 1, "alignment": "bottom_right"},
            "lengths": {"alibi": 1, **_LENGTHS, **CAUSAL},
            "lengths_bottom_right": {"alibi": 1, **_LENGTHS, **BOTTOM_RIGHT},
            "window": {"alibi": 1, "window": (90, None), **CAUSAL},
            "lse_grad": {"alibi": 1, "lse_grad": True, **CAUSAL},
            "dropout": {"alibi": 1, "dropout": 0.1, **CAUSAL},
        },
        (SQUARE, MORE_QUERIES),
    ),
    *table("alibi", {"bottom_right": {"alibi": 1, **BOTTOM_RIGHT}}, (ONE_QUERY, MLA)),
)

SOFT_CAPS: tuple[Case, ...] = (
    *table(
        "soft_cap",
        {"full": {"soft_cap": 3.0}, "causal": {"soft_cap": 3.0, **CAUSAL}},
        (*FOUR, ODD),
    ),
    *table(
        "soft_cap",
        {
            "large_scores": {"soft_cap": 30.0, "magnitude": 6.0, **CAUSAL},
            "bottom_right": {"soft_cap": 3.0, **BOTTOM_RIGHT},
            "window": {"soft_cap": 3.0, "window": (60, None), **CAUSAL},
            "lengths": {"soft_cap": 3.0, **_LENGTHS},
            "sinks": {"soft_cap": 3.0, "sinks": 1, **CAUSAL},
            "lse_grad": {"soft_cap": 3.0, "lse_grad": True},
            "alibi": {"soft_cap": 3.0, "alibi": 1, **CAUSAL},
        },
        (SQUARE, MORE_KEYS),
    ),
    *table("soft_cap", {"full": {"soft_cap": 3.0}}, (ONE_QUERY, MLA)),
)

SINKS: tuple[Case, ...] = (
    *table(
        "sinks",
        {
            "full": {"sinks": 1},
            "causal": {"sinks": 1, **CAUSAL},
            "window": {"sinks": 1, "window": (128, None), **CAUSAL},
        },
        (*FOUR, ODD),
    ),
    *table_in_turn(
        "sinks",
        {
            "of_batch": {"sinks": 2, **CAUSAL},
            "bottom_right": {"sinks": 1, **BOTTOM_RIGHT},
            "lengths": {"sinks": 1, **_LENGTHS, **CAUSAL},
            "mask": {"sinks": 1, "mask": "11ts", "dead_rows": True},
            "lse_grad": {"sinks": 1, "lse_grad": True, **CAUSAL},
            "dropout": {"sinks": 1, "dropout": 0.2, **CAUSAL},
            "negative_scores": {"sinks": 1, "score_shift": -60.0, **CAUSAL},
            "deterministic": {"sinks": 1, "deterministic": True, **CAUSAL},
        },
        (SQUARE, HALF_TILE, MORE_KEYS),
    ),
    *table("sinks", {"causal": {"sinks": 1, **BOTTOM_RIGHT}}, (ONE_QUERY, MLA)),
)

_NEGATIVE = {"score_shift": -200.0}

EXTREMES: tuple[Case, ...] = (
    *table(
        "negative",
        {
            "full": _NEGATIVE,
            "causal": _NEGATIVE | CAUSAL,
            "lengths": _NEGATIVE | _LENGTHS,
            "window": _NEGATIVE | {"window": (70, None), **CAUSAL},
        },
        FOUR,
    ),
    *table(
        "negative",
        {
            "bottom_right": _NEGATIVE | BOTTOM_RIGHT,
            "mask": _NEGATIVE | {"mask": "b11s", **CAUSAL},
            "bias": _NEGATIVE | {"bias": "1nts", **CAUSAL},
            "soft_cap": {"score_shift": -60.0, "soft_cap": 80.0, **CAUSAL},
        },
        (SQUARE, HALF_TILE),
    ),
    *table(
        "positive", {"full": {"score_shift": 200.0}, "causal": {"score_shift": 200.0, **CAUSAL}}
    ),
    *table("large", {"full": {"magnitude": 8.0}, "causal": {"magnitude": 8.0, **CAUSAL}}),
    # SMALL is left out: with few keys the output is large, and with it the rounding error in delta.
    *table("negative", {"full": _NEGATIVE}, (ONE_QUERY, MLA)),
)
