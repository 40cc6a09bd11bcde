"""Cases of further results, of transforms of the call, and of many options at once."""

from __future__ import annotations

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
    Packed,
    Ragged,
    table,
    table_in_turn,
)

_LENGTHS = {"q_lengths": (1, 0.45, 0), "kv_lengths": (1, 0.7, 0.3)}
_WINDOW = {"window": (60, None), **CAUSAL}
_PACKED = {
    "packed": Packed((((1, 0.4), (2, 0.3), (4, 0.2)), ((1, 0.1), (3, 0.8)))),
    "max_segments": 4,
    **CAUSAL,
}
_RAGGED = {"packed": Ragged(((0.3, 0.1, 0.5),), ((0.4, 0.2, 0.3),)), **CAUSAL}

DROPOUT: tuple[Case, ...] = (
    *table(
        "dropout",
        {
            "tenth": {"dropout": 0.1},
            "causal": {"dropout": 0.3, **CAUSAL},
            "lengths": {"dropout": 0.2, **_LENGTHS},
        },
        FOUR,
    ),
    *table(
        "dropout",
        {
            "most": {"dropout": 0.9},
            "bottom_right": {"dropout": 0.2, **BOTTOM_RIGHT},
            "window": {"dropout": 0.2, **_WINDOW},
            "keys_of_rows": {"dropout": 0.2, "dropout_keys": 2},
            "rbg": {"dropout": 0.2, "dropout_impl": "rbg", **CAUSAL},
            "lse_grad": {"dropout": 0.2, "lse_grad": True, **CAUSAL},
            "deterministic": {"dropout": 0.2, "deterministic": True, **CAUSAL},
        },
        (SQUARE, MORE_QUERIES),
    ),
)

LSE_GRADIENTS: tuple[Case, ...] = (
    *table(
        "lse_grad",
        {"full": {"lse_grad": True}, "causal": {"lse_grad": True, **CAUSAL}},
        (*FOUR, ODD),
    ),
    *table(
        "lse_grad",
        {
            "bottom_right": {"lse_grad": True, **BOTTOM_RIGHT},
            "window": {"lse_grad": True, **_WINDOW},
            "lengths": {"lse_grad": True, **_LENGTHS},
            "mask": {"lse_grad": True, "mask": "11ts", "dead_rows": True},
            "negative_scores": {"lse_grad": True, "score_shift": -200.0},
            "deterministic": {"lse_grad": True, "deterministic": True, **CAUSAL},
        },
        (SQUARE, MORE_QUERIES),
    ),
    *table("lse_grad", {"full": {"lse_grad": True}}, (SMALL, ONE_QUERY, MLA)),
)

ROW_MAXIMA: tuple[Case, ...] = (
    *table(
        "row_max",
        {"full": {"needs_max": True}, "causal": {"needs_max": True, **CAUSAL}},
        (*FOUR, ODD),
    ),
    *table(
        "row_max",
        {
            "bottom_right": {"needs_max": True, **BOTTOM_RIGHT},
            "window": {"needs_max": True, **_WINDOW},
            "lengths": {"needs_max": True, **_LENGTHS},
            "bias": {"needs_max": True, "bias": "1nts", **CAUSAL},
            "soft_cap": {"needs_max": True, "soft_cap": 3.0},
            "sinks": {"needs_max": True, "sinks": 1},
            "alibi": {"needs_max": True, "alibi": 1, **CAUSAL},
            "mask": {"needs_max": True, "mask": "11ts", "dead_rows": True},
            "negative_scores": {"needs_max": True, "score_shift": -200.0},
            "lse_grad": {"needs_max": True, "lse_grad": True, **CAUSAL},
        },
        (SQUARE,),
    ),
    *table("row_max", {"full": {"needs_max": True}}, (ONE_QUERY,)),
)

DETERMINISTIC: tuple[Case, ...] = (
    *table(
        "deterministic",
        {
            "full": {"deterministic": True},
            "causal": {"deterministic": True, **CAUSAL},
            "bottom_right": {"deterministic": True, **BOTTOM_RIGHT},
        },
        (*FOUR, MLA),
    ),
    *table(
        "deterministic",
        {
            "window": {"deterministic": True, **_WINDOW},
            "lengths": {"deterministic": True, **_LENGTHS, **CAUSAL},
            "ragged": {"deterministic": True, **_RAGGED},
            "one_kv_head": {"deterministic": True, "k": 1, **CAUSAL},
            "no_groups": {"deterministic": True, "k": 4},
        },
        (SQUARE, MORE_QUERIES),
    ),
)

ONE_QUERY_CASES: tuple[Case, ...] = table(
    "one_query",
    {
        "lengths": {"kv_lengths": (1, 0.7, 0)},
        "lengths_bottom_right": {"kv_lengths": (1, 0.7, 0), **BOTTOM_RIGHT},
        "window": {"window": (100, None), **BOTTOM_RIGHT},
        "mask": {"mask": "b11s"},
        "no_groups": {"k": 8, **BOTTOM_RIGHT},
        "one_kv_head": {"k": 1},
        "half_tile": {"s": 192},
        "odd": {"s": 333, **BOTTOM_RIGHT},
        "few_keys": {"s": 3},
    },
    (ONE_QUERY,),
)

INFERENCE: tuple[Case, ...] = (
    *table(
        "inference",
        {"full": {"inference": True}, "causal": {"inference": True, **CAUSAL}},
        (SQUARE, HALF_TILE, MORE_QUERIES, ONE_QUERY, MLA),
    ),
    *table_in_turn(
        "inference",
        {
            "bottom_right": {"inference": True, **BOTTOM_RIGHT},
            "window": {"inference": True, **_WINDOW},
            "lengths": {"inference": True, **_LENGTHS},
            "mask": {"inference": True, "mask": "b1ts"},
            "bias": {"inference": True, "bias": "1nts"},
            "sinks": {"inference": True, "sinks": 1, **CAUSAL},
            "packed": {"inference": True, **_PACKED},
            "ragged": {"inference": True, **_RAGGED},
            "dropout": {"inference": True, "dropout": 0.2},
        },
        (SQUARE, HALF_TILE, MORE_KEYS),
    ),
    *table(
        "inference",
        {
            "lengths": {"inference": True, "kv_lengths": (1, 0.7, 0), **BOTTOM_RIGHT},
            "soft_cap": {"inference": True, "soft_cap": 3.0},
            "alibi": {"inference": True, "alibi": 1, **BOTTOM_RIGHT},
        },
        (ONE_QUERY,),
    ),
)

_TRANSFORMED = {
    "causal": CAUSAL,
    "lengths": {"q_lengths": (1, 0.45, 0, 0.8), "kv_lengths": (1, 0.7, 0.3, 0), **CAUSAL},
    "bias": {"bias": "bnts", **CAUSAL},
}
_IN_PARTS = {
    "packed": {
        "packed": Packed(
            (
                ((1, 0.4), (2, 0.3), (4, 0.2)), ((1, 0.1), (3, 0.8)),
                ((2, 1),), ((0, 0.3), (1, 0.7)),
            )
        ),
        "max_segments": 4,
        **CAUSAL,
    },
    "ragged": {
        "packed": Ragged(
            ((0.3, 0.1, 0.5), (0, 0.5, 0.5), (0.2, 0.2, 0.2), (1, 0, 0)),
            ((0.4, 0.2, 0.3), (0.5, 0.5, 0), (0.1, 0.6, 0.3), (1, 0, 0)),
        ),
    },
    "dropout": {"dropout": 0.2, "dropout_keys": 4, "b": 4, **CAUSAL},
    "shared_sinks": {"sinks": 1, "b": 4, **CAUSAL},
    "shared_mask": {"mask": "1n1s", "b": 4},
}  # fmt: skip
_B4 = {"b": 4, "t": 128, "s": 192, "dtype": "bfloat16", "h": 64}

TRANSFORMS: tuple[Case, ...] = tuple(
    case
    for transform in ("vmap", "scan", "checkpoint", "eager", "donate")
    for case in table(
        "transforms",
        {
            f"{transform}_{name}": {"transform": transform, **facts}
            for name, facts in (
                _TRANSFORMED | (_IN_PARTS if transform in ("vmap", "scan") else {})
            ).items()
        },
        (_B4,),
    )
)

_ALMOST_ALL = {"is_causal": True, "window": (100, None), "sinks": 1, "lse_grad": True}

COMBINATIONS: tuple[Case, ...] = table_in_turn(
    "combined",
    {
        "window_sinks_lengths": {**_ALMOST_ALL, **_LENGTHS},
        "window_sinks_bottom_right": {**_ALMOST_ALL, "alignment": "bottom_right"},
        "bias_mask_lengths": {"bias": "1nts", "mask": "b11s", **_LENGTHS, **CAUSAL},
        "bias_dropout_max": {"bias": "1nts", "dropout": 0.2, "needs_max": True, **CAUSAL},
        "soft_cap_window_sinks": {"soft_cap": 10.0, **_WINDOW, "sinks": 1},
        "soft_cap_lengths_bias": {"soft_cap": 10.0, "bias": "1nts", **_LENGTHS, **CAUSAL},
        "alibi_window_lengths": {"alibi": 1, **_WINDOW, **_LENGTHS},
        "deterministic_window_lengths": {"deterministic": True, **_WINDOW, **_LENGTHS},
        "negative_window_lengths": {"score_shift": -200.0, **_WINDOW, **_LENGTHS},
        "dropout_window_lengths": {"dropout": 0.15, **_WINDOW, **_LENGTHS},
        "packed_window_sinks_lse": {**_PACKED, "window": (40, None), "sinks": 1, "lse_grad": True},
        "everything": {
            "is_causal": True, "alignment": "bottom_right", "window": (90, None), "bias": "1nts",
            "alibi": 1, "sinks": 1, "dropout": 0.2, "lse_grad": True, "needs_max": True,
            "mask": "b11s", "soft_cap": 20.0, **_LENGTHS,
        },
    },
    (SQUARE, HALF_TILE, MORE_KEYS),
)  # fmt: skip
